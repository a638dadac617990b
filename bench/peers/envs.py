"""Each peer in an environment of its own: a virtual environment, and for llama.cpp a build of its sources beside it.

What an install made is listed in `installed.json` of the environment, written last: without it the peer counts as not
installed. The steps' output goes to `install.log` there. Nothing is installed unless it is asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidParameter, RequestFailed, UsageError

__all__ = ["LLAMA_CPP", "OPENVINO", "PEERS", "TRANSFORMERS", "Environment", "environment_of", "install"]

LLAMA_CPP, OPENVINO, TRANSFORMERS = "llama.cpp", "openvino", "transformers"
LLAMA_TARGETS = ("llama-server", "llama-quantize")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """packages for pip; `shown`, whose versions are reported; `build`, what follows them."""

    packages: tuple[str, ...]
    shown: tuple[str, ...]
    build: Callable[[Path, int], dict[str, str]] = lambda folder, jobs: {}


@dataclass(frozen=True, slots=True)
class Environment:
    """An installed peer: the folder it lives in, and the versions of what counts."""

    folder: Path
    versions: dict[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def program(self, name: str) -> Path:
        """A program that the install built or pip brought."""
        built = self.folder / "build" / "bin" / name
        return built if built.exists() else self.folder / "bin" / name


def environment_of(envs: Path, peer: str) -> Environment | None:
    """None where the peer is not installed."""
    _check(peer)
    folder = (envs / peer).resolve()
    try:
        return Environment(folder, json.loads((folder / "installed.json").read_text()))
    except FileNotFoundError:
        return None


def install(envs: Path, peer: str, jobs: int) -> Environment:
    """Make the environment from nothing or over what is there. Raises RequestFailed with the log where a step fails."""
    _check(peer)
    recipe, folder = PEERS[peer], (envs / peer).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "installed.json").unlink(missing_ok=True)
    _run(folder, [sys.executable, "-m", "venv", str(folder)])
    _run(folder, [*_pip(folder), "install", *recipe.packages])
    versions = {name: _version(folder, name) for name in recipe.shown} | recipe.build(folder, jobs)
    (folder / "installed.json").write_text(json.dumps(versions))
    return Environment(folder, versions)


def _check(peer: str) -> None:
    if peer not in PEERS:
        raise InvalidParameter("peer", peer, f"one of {', '.join(PEERS)}")


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _run(folder: Path, command: Sequence[str]) -> None:
    with (folder / "install.log").open("ab") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        except FileNotFoundError as error:
            raise UsageError(f"{command[0]} is missing; install it and try again.") from error
    if code:
        raise RequestFailed(f"`{' '.join(command)}` ended with code {code}; see {log.name}.")


def _version(folder: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _build_llama_cpp(folder: Path, jobs: int) -> dict[str, str]:
    """From the sources that `llama-cpp-python` carries, for this machine's instructions."""
    name = "llama-cpp-python"
    _run(folder, [*_pip(folder), "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), name])
    archive = max(folder.glob("llama_cpp_python-*.tar.gz"), key=lambda p: p.stat().st_mtime)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    version = archive.name.removesuffix(".tar.gz").rpartition("-")[2]
    sources, build = folder / archive.name.removesuffix(".tar.gz"), folder / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    _run(folder, ["cmake", "-S", str(sources / "vendor" / "llama.cpp"), "-B", str(build), *options])
    targets = ["--target", *LLAMA_TARGETS, "--parallel", str(jobs)]
    _run(folder, ["cmake", "--build", str(build), *targets])
    bindings = folder / "bindings"
    bindings.unlink(missing_ok=True)
    bindings.symlink_to(sources)
    return {"llama.cpp, as in llama-cpp-python": version}


PEERS = {
    LLAMA_CPP: _Recipe(("numpy", "typing-extensions", "diskcache", "jinja2"), (), _build_llama_cpp),
    OPENVINO: _Recipe(
        ("openvino-genai", "optimum-intel[openvino]"), ("openvino-genai", "openvino", "optimum-intel", "nncf")
    ),
    TRANSFORMERS: _Recipe(("torch", "transformers", "safetensors"), ("transformers", "torch")),
}
