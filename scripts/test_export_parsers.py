"""Exports against the real parsers of other engines, each run in an environment of its own where it installs.

    pip install -e '.[dev]' openvino-genai      # or a vLLM wheel
    python -m pytest scripts/test_export_parsers.py

Not part of `make test`: the engines are large and their dependencies disagree with one another. What they were
last run against is in docs/planning.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "plan"))

from test_export import DRAFTS, LACKS, advice, rendered


def test_vllm_takes_the_configuration(tmp_path: Path) -> None:
    """vLLM's own parser: every key known, and the n-gram configuration constructed with its table."""
    vllm = pytest.importorskip("vllm.config", reason="vLLM is not installed")
    known = {f.name for f in fields(vllm.SpeculativeConfig)}
    for kind in sorted(set(DRAFTS) - LACKS["vllm"]):
        assert set(json.loads(rendered("vllm", advice(kind)).files["speculative_config.json"])) <= known
    tiny = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    target = vllm.ModelConfig(
        model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True, max_model_len=128
    )
    config = json.loads(rendered("vllm", advice("ngram", tensor=1)).files["speculative_config.json"])
    made = vllm.SpeculativeConfig(
        **config, target_model_config=target, target_parallel_config=vllm.ParallelConfig()
    )
    assert [list(e) for e in made.num_speculative_tokens_per_batch_size] == [
        [1, 4, 5],
        [5, 16, 2],
        [17, 64, 0],
    ]


def test_openvino_takes_the_configuration() -> None:
    genai = pytest.importorskip("openvino_genai", reason="OpenVINO GenAI is not installed")
    config = genai.GenerationConfig()
    for key, value in json.loads(
        rendered("openvino", advice("ngram")).files["generation_config.json"]
    ).items():
        setattr(config, key, value)
    config.max_new_tokens = 256  # as run.py sets it; the parser wants an end
    config.validate()
