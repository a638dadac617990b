"""`paceline serve`: the model behind the OpenAI protocol."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import socket
from pathlib import Path

from paceline.cli.options import add_engine_options, build_llm, say
from paceline.errors import InvalidParameter, MissingExtra, UsageError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over the OpenAI protocol",
        description="Serve a model over the OpenAI protocol, with metrics at /metrics and a live page at /.",
        allow_abbrev=False,
    )
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s, this machine only")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 picks a free one (default: %(default)s)")
    group.add_argument("--served-name", metavar="NAME", help="the model's name in requests (default: MODEL)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeatable, a tenant each"
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a key a line, or TENANT and KEY; not seen in process lists"
    )
    group.add_argument("--max-concurrency", type=int, default=8, metavar="N", help="decoded together (%(default)s)")
    group.add_argument("--max-queue", type=int, default=64, metavar="N", help="waiting at most (%(default)s), then 429")
    group.add_argument("--max-body-mb", type=float, default=8.0, metavar="MB", help="of a request (%(default)s)")
    group.add_argument("--grace", type=float, default=30.0, metavar="S", help="s for answers on stop (%(default)s)")
    group.add_argument("--access-log", action="store_true", help="a line a request on stderr")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    keys = read_keys(args.api_key, args.api_key_file)
    require_serve()
    from paceline.serve.run import open_socket

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with open_socket(args.host, args.port) as listener:
        return _serve(args, keys, listener)


def _serve(args: argparse.Namespace, keys: dict[str, str], listener: socket.socket) -> int:
    from paceline.serve.metrics import Metrics
    from paceline.serve.run import Server
    from paceline.serve.service import ServiceOptions

    metrics = Metrics()
    llm = build_llm(args, max_batch=args.max_concurrency, on_record=metrics.record)
    name = args.served_name or args.model
    options = ServiceOptions(name, args.max_queue, int(args.max_body_mb * 2**20), keys)
    server = Server(llm, metrics, options, grace_s=args.grace, access_log=args.access_log)
    host, port = listener.getsockname()[:2]
    place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    say(f"serving {name} at {place}/v1 (live page: {place}/, stop with Ctrl-C)")
    if not keys and host not in ("127.0.0.1", "::1"):
        say("paceline: anyone who reaches this address can use it; give --api-key or --api-key-file")
    server.serve_on(listener)
    return 1 if server.failed else 0


def require_serve() -> None:
    """Raise MissingExtra where the server's dependencies are not installed."""
    missing = [n for n in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(n) is None]
    if missing:
        raise MissingExtra(
            f"serving needs {', '.join(missing)}, not installed here; install them with "
            f"`pip install 'paceline[engine,serve]'`."
        )


def read_keys(given: list[str], path: Path | None) -> dict[str, str]:
    """API key -> tenant, from the command line and from a file of keys, or tenants and keys, a line each."""
    lines = [(f"--api-key number {i}", key) for i, key in enumerate(given, start=1)]
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the key file {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"the key file {path} is not UTF-8 text.") from error
        numbered = enumerate(text.splitlines(), start=1)
        lines += [(f"{path} line {i}", line) for i, line in numbered if line.strip() and not line.startswith("#")]
        if not lines:
            raise UsageError(f"the key file {path} holds no key; write one a line, or leave --api-key-file out.")
    keys: dict[str, str] = {}
    for where, line in lines:
        words = line.split()
        if not 1 <= len(words) <= 2 or not words[-1].isascii():
            raise UsageError(f"{where}: write KEY, or TENANT and KEY, in ASCII without spaces.")
        if words[-1] in keys:
            raise UsageError(f"{where}: this key was given before.")
        own = hashlib.sha256(words[-1].encode()).hexdigest()[:16]
        keys[words[-1]] = words[0] if len(words) == 2 else own
    return keys


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port <= 65535:
        raise InvalidParameter("--port", args.port, "a port from 0 to 65535")
    if args.max_concurrency < 1:
        raise InvalidParameter("--max-concurrency", args.max_concurrency, "a whole number from 1")
    if args.max_queue < 0:
        raise InvalidParameter("--max-queue", args.max_queue, "a whole number from 0")
    for name, value in (("--grace", args.grace), ("--max-body-mb", args.max_body_mb)):
        if not 0 <= value < 1e6:
            raise InvalidParameter(name, value, "a number from 0")
