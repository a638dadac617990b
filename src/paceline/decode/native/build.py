"""Compiles `decoder.cpp` once for each processor and compiler, and keeps what came of it.

What the compiler makes is kept beside the fetched models under a name made of the source, the flags, the compiler's
version and the processor's abilities; so every start on one machine runs the same code. Which processor may use it
goes by its abilities, never by its name. A process tries once: where that fails, it keeps the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.decode.model.fetch import cache_folder

__all__ = ["Availability", "NotBuilt", "availability", "build", "library"]

_SOURCE = Path(__file__).with_name("decoder.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w")
_NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "f16c")
_COMPILERS = ("c++", "g++", "clang++")
_TIME_LIMIT_S = 300
_WORDS_SHOWN = 300  # characters of a compiler's message


class NotBuilt(Exception):
    """The compiler failed, took too long, or what it made cannot be loaded; says which."""


@dataclass(frozen=True, slots=True)
class Availability:
    """`missing`: why the compiled decoder cannot be had here; empty where it can."""

    missing: str = ""

    def __bool__(self) -> bool:
        return not self.missing


@cache
def availability() -> Availability:
    """Whether this machine has what the compiled decoder needs, without compiling it."""
    lacking = [flag for flag in _NEEDED if flag not in _processor_flags()]
    if lacking:
        return Availability(f"the processor lacks {', '.join(lacking)}")
    if not _built_path_known() and _compiler() is None:
        return Availability(f"there is no C++ compiler (looked for {', '.join(_COMPILERS)}); install one, such as g++")
    return Availability()


def build(progress: Callable[[str], None] | None = None) -> Availability:
    """Whether the compiled decoder can be had here, found by compiling and loading it where that is still to do."""
    if not (found := availability()):
        return found
    if progress is not None and not _tried.cache_info().currsize and not _built_path_known():
        progress("compiling the decoder for this processor (once, some 10 s)")
    tried = _tried()
    return Availability(tried) if isinstance(tried, str) else Availability()


def library() -> ctypes.CDLL:
    """The compiled decoder, compiled first where need be. Raises NotBuilt where `build` says what is missing."""
    if not (found := build()):
        raise NotBuilt(found.missing)
    loaded = _tried()
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


@cache
def _tried() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        path = _path()
        if not path.exists():
            _compile(path)
        return _loaded(path)
    except NotBuilt as error:
        return str(error)
    except OSError as error:
        return f"the compiled decoder cannot be kept or loaded ({error})"


def _loaded(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.paceline_new.restype = ctypes.c_void_p
    loaded.paceline_block_bytes.restype = ctypes.c_int64
    return loaded


def _compile(path: Path) -> None:
    """Into a file of its own first, so that no other process ever loads half of it."""
    compiler = _compiler()
    if compiler is None:
        raise NotBuilt("there is no C++ compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    part = Path(name).with_suffix(".o")
    threads = _openmp()
    try:
        _run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(part)])
        _run([compiler, "-shared", str(part), "-o", name, *(["-fopenmp"] if threads is None else [threads])])
        Path(name).replace(path)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{compiler} took more than {_TIME_LIMIT_S} s over the decoder") from error
    finally:
        Path(name).unlink(missing_ok=True)
        part.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    if done.returncode:
        raise NotBuilt(f"{command[0]} could not compile the decoder: {_last_words(done.stderr)}")


def _last_words(text: str) -> str:
    """The end of what a compiler said, on one line."""
    return " ".join(text.split())[-_WORDS_SHOWN:] or "it said nothing"


@cache
def _openmp() -> str | None:
    """The OpenMP library that PyTorch has loaded: with one of its own the decoder's threads would fight PyTorch's."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
    return next((p for p in paths if Path(p).name.startswith(("libgomp", "libomp", "libiomp"))), None)


def _built_path_known() -> bool:
    try:
        return _path().exists()
    except OSError:
        return False


@cache
def _path() -> Path:
    compiler = _compiler()
    version = (
        ""
        if compiler is None
        else subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout.partition(
            "\n"
        )[0]
    )
    made_of = [_SOURCE.read_text(encoding="utf-8"), *_FLAGS, str(_openmp()), version, *sorted(_processor_flags())]
    name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:24]
    return cache_folder() / "compiled" / f"{name}.so"


@cache
def _compiler() -> str | None:
    asked = os.environ.get("CXX", "").split()[:1]
    return next((found for name in (*asked, *_COMPILERS) if (found := shutil.which(name))), None)


@cache
def _processor_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
