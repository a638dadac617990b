"""Greedy text after a restart: two processes, one drafting and one not, each of the quantised and 16-bit kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import save_folder, tiny_backend, tiny_model

KINDS = ("bfloat16", "int8", "int4")
PROGRAM = """
import json, sys
from paceline import LLM, SamplingParams

def text(kind):
    llm = LLM(sys.argv[1], dtype=kind, draft=sys.argv[2], threads=1, max_context=256)
    asked = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    done = llm.generate(["one two one two one", "def add(a, b):"], asked)
    return [o.completions[0].token_ids for o in done], sum(o.completions[0].stats.drafted for o in done)

print(json.dumps([text(kind) for kind in sys.argv[3:]]))
"""


def test_text_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """Weights are packed again by other threads; the compiled library is made by one process and found by the other."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = tiny_model("llama", 3, head_dim=32, initializer_range=0.12, max_position_embeddings=256, **shape)
    folder = str(save_folder(tmp_path / "m", model, tiny_backend()))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, draft, *KINDS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for draft, seed in (("none", "1"), ("suffix", "2"))
    ]
    plain, drafted = (json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started)
    for kind, (texts, none), (again, drafts) in zip(KINDS, plain, drafted, strict=True):
        assert texts == again and all(len(tokens) == 48 for tokens in texts), kind
        assert not none and drafts, kind
    assert len({json.dumps(texts) for texts, _ in plain}) == len(KINDS), "the kinds say different texts"
