"""Compiles `decoder.cpp` once for each processor and compiler, and keeps what came of it.

What the compiler makes is kept beside the fetched models under a name made of the source, the flags, the compiler's
version and the processor's abilities; so every start on one machine runs the same code. Which processor may use it
goes by its abilities, never by its name.
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

__all__ = ["Availability", "availability", "library"]

_SOURCE = Path(__file__).with_name("decoder.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w")
_NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "f16c")
_COMPILERS = ("c++", "g++", "clang++")
_TIME_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Availability:
    """`missing`: why the compiled decoder cannot be had here; empty where it can."""

    missing: str = ""

    def __bool__(self) -> bool:
        return not self.missing


@cache
def availability() -> Availability:
    """Whether this machine can run the compiled decoder, without compiling it."""
    lacking = [flag for flag in _NEEDED if flag not in _processor_flags()]
    if lacking:
        return Availability(f"the processor lacks {', '.join(lacking)}")
    if not _built_path_known() and _compiler() is None:
        return Availability(f"there is no C++ compiler (looked for {', '.join(_COMPILERS)}); install one, such as g++")
    return Availability()


@cache
def library(progress: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The compiled decoder, compiled first where need be. Only where `availability()` is true.

    Raises RuntimeError where the compiler fails, with its last words.
    """
    path = _path()
    if not path.exists():
        if progress is not None:
            progress("compiling the decoder for this processor (once, some 10 s)")
        _compile(path)
    loaded = ctypes.CDLL(str(path))
    loaded.paceline_new.restype = ctypes.c_void_p
    loaded.paceline_block_bytes.restype = ctypes.c_int64
    return loaded


def _compile(path: Path) -> None:
    """Into a file of its own first, so that no other process ever loads half of it."""
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
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
        raise RuntimeError(f"{compiler} took more than {_TIME_LIMIT_S} s over the decoder") from error
    finally:
        Path(name).unlink(missing_ok=True)
        part.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} could not compile the decoder: {done.stderr.strip()[-400:]}")


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
