"""How far each engine's weights are from the float32 model: one harness, the same positions for all.

The reference is Transformers in float32 over the model's floats. Texts are prompts of the workloads, through the chat
template, cut to `longest` tokens; a beginning that several have counts once. At every position the whole
distribution of the next token is compared: whether the most probable token is the same, and the Kullback-Leibler
divergence from the reference, in nats. All engines give whole distributions: Paceline by passes of its engine's model,
llama.cpp through its Python bindings and the built library, OpenVINO by the converted model itself, each with its own
default precision. Of a model whose file is quantised the floats are those the file stands for, so that llama.cpp's
`file` shows its arithmetic alone, and other weights what they lose on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers.arms import Arm
from bench.peers.child import Child
from bench.peers.speed import Prompt, markdown
from paceline.bench.paired import bootstrap_interval

__all__ = ["Divergence", "compare", "divergence", "new_positions", "quality_table"]

Logits = NDArray[np.float32]  # [positions, vocabulary]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of one text: by position, whether the most probable token is the reference's, and the divergence in nats."""

    same: NDArray[np.bool_]
    nats: NDArray[np.float64]


def divergence(reference: Logits, other: Logits) -> Divergence:
    """KL(reference || other)."""
    assert reference.shape == other.shape, f"{reference.shape} against {other.shape}"
    one, two = _log_softmax(reference), _log_softmax(other)
    return Divergence(one.argmax(-1) == two.argmax(-1), (np.exp(one) * (one - two)).sum(-1))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(
    reference: Child,
    children: Mapping[Arm, Child],
    prompts: Sequence[Prompt],
    vocab_size: int,
    folder: Path,
    *,
    longest: int,
    say: Callable[[str], None],
) -> dict[Arm, list[Divergence]]:
    """By arm a divergence a text. Logits pass through a file in `folder`."""
    seen: set[tuple[int, ...]] = set()
    found: dict[Arm, list[Divergence]] = {arm: [] for arm in children}
    for number, prompt in enumerate(prompts):
        ids = list(prompt.ids[:longest])
        rows = new_positions(ids, seen)
        base = _score(reference, ids, folder)[rows, :vocab_size]
        for arm, child in children.items():
            found[arm].append(divergence(base, _score(child, ids, folder)[rows, :vocab_size]))
        say(f"text {number + 1} of {len(prompts)}")
    return found


def new_positions(ids: Sequence[int], seen: set[tuple[int, ...]]) -> list[int]:
    """Positions whose prefix no earlier text had, and which are now in `seen`: chat templates begin alike, and what
    happens at one of their positions would count once a text."""
    prefixes = [tuple(ids[: end + 1]) for end in range(len(ids))]
    new = [position for position, prefix in enumerate(prefixes) if prefix not in seen]
    seen.update(prefixes)
    return new


def _score(child: Child, ids: Sequence[int], folder: Path) -> Logits:
    path = folder / "logits.npy"
    child.ask("score", tokens=list(ids), path=str(path))
    logits: Logits = np.load(path)
    path.unlink()
    assert len(logits) == len(ids), f"{child.name} gave {len(logits)} rows for {len(ids)} tokens"
    return logits


def quality_table(found: Mapping[Arm, Sequence[Divergence]]) -> str:
    """Markdown; the interval of the mean is a bootstrap over texts."""
    rows = [["weights", "positions", "top-1 as float32", "mean KL (interval)", "median KL", "99 % of KL below"]]
    for arm, texts in found.items():
        same, nats = np.concatenate([t.same for t in texts]), np.concatenate([t.nats for t in texts])
        by_text = [float(np.exp(t.nats.mean())) for t in texts]  # the bootstrap is of geometric means
        low, high = np.log(bootstrap_interval(by_text, 0)) if len(texts) > 1 else (np.nan, np.nan)
        mean = f"{nats.mean():.5f} ({low:.5f} to {high:.5f})"
        tail = [f"{np.median(nats):.5f}", f"{np.quantile(nats, 0.99):.4f}"]
        rows.append([f"{arm.engine}:{arm.weights}", str(len(same)), f"{100 * same.mean():.2f} %", mean, *tail])
    return markdown(rows)
