"""One model as every engine reads it, made once and kept: all from the same file, so that the weights are the same.

Of a GGUF file llama.cpp reads the file itself, or the file's floats in another type. Everything else begins with the
file's floats as Paceline reads them, in a Hugging Face folder: Transformers loads that, OpenVINO's exporter
(optimum-intel) converts it. Where the file is quantised already, the floats are those it stands for: a 16-bit model
made of them is that quantised model, held wider, and not the model that was quantised.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from bench.peers.envs import LLAMA_CPP, OPENVINO, TRANSFORMERS, Environment
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.model.source import SourceKind, resolve_source
from paceline.errors import RequestFailed, UsageError

__all__ = ["ModelFiles"]


class ModelFiles:
    """spec     the model as Paceline takes it
    folder   where what is made of models is kept, one folder for each file's content
    say      hears what is being made
    """

    def __init__(self, spec: str, folder: Path, say: Callable[[str], None]) -> None:
        self.spec, self._say = spec, say
        self.source = resolve_source(spec, say)
        self._own = folder / f"{self.source.path.stem}-{_digest(self.source.path)}"

    def path_for(self, engine: str, weights: str, env: Environment | None) -> str:
        """What that engine loads for those weights. Raises UsageError where there is no way to them."""
        if engine == LLAMA_CPP:
            assert env is not None
            return str(self._gguf(weights, env))
        if engine == OPENVINO:
            assert env is not None
            return str(self._openvino(weights, env))
        return str(self._floats()) if engine == TRANSFORMERS else self.spec

    def _gguf(self, weights: str, env: Environment) -> Path:
        if self.source.kind is not SourceKind.GGUF:
            raise UsageError(f"llama.cpp reads GGUF files, and {self.spec} is none; leave its arms out.")
        if weights == "file":
            return self.source.path

        def quantise(path: Path) -> list[str]:
            return [str(env.program("llama-quantize")), "--allow-requantize", str(self.source.path), str(path), weights]

        return self._made(f"{weights}.gguf", quantise)

    def _openvino(self, weights: str, env: Environment) -> Path:
        def export(path: Path) -> list[str]:
            task = ["--task", "text-generation-with-past", "--weight-format", weights]
            return [
                str(env.program("optimum-cli")),
                "export",
                "openvino",
                "--model",
                str(self._floats()),
                *task,
                str(path),
            ]

        return self._made(f"openvino-{weights}", export)

    def _made(self, name: str, command: Callable[[Path], list[str]]) -> Path:
        """Written beside its place and moved there when it is whole."""
        place, draft = self._own / name, self._own / f"part-{name}"
        if not place.exists():
            self._own.mkdir(parents=True, exist_ok=True)
            words = command(draft)
            self._say(f"making {place}")
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RequestFailed(f"`{' '.join(words)}` ended with code {done.returncode}: {done.stderr[-600:]}")
            draft.rename(place)
        return place

    def _floats(self) -> Path:
        """The Hugging Face folder, in float32."""
        if self.source.kind is not SourceKind.GGUF:
            return self.source.path
        place, draft = self._own / "float32", self._own / "part-float32"
        if not place.exists():
            self._say(f"making {place}")
            draft.mkdir(parents=True, exist_ok=True)
            _save(self.spec, draft)
            draft.rename(place)
        return place


def _save(spec: str, folder: Path) -> None:
    checkpoint = load_checkpoint(spec, dtype=torch.float32)
    with torch.device("meta"):
        checkpoint.config.architectures = [type(AutoModelForCausalLM.from_config(checkpoint.config)).__name__]
    checkpoint.config.save_pretrained(folder)
    save_file(dict(checkpoint.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    if checkpoint.tokenizer is None:
        raise UsageError(f"{spec} comes without a tokenizer, and the peers want one.")
    checkpoint.tokenizer.backend.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))


def _digest(path: Path) -> str:
    """Of a file's content; of a folder, the content of its weights."""
    hashed = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            while block := opened.read(1 << 24):
                hashed.update(block)
    return hashed.hexdigest()[:12]
