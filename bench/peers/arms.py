"""What is run side by side, by name: `ENGINE:WEIGHTS:MODE[*STREAMS]`, as in `llama.cpp:file:ngram-mod/8/4/16` or
`paceline:int8:auto*8`.

WEIGHTS and MODE are the engine's own words; see `ENGINES`. STREAMS prompts are answered at once (1 where it is left
out). Numbers behind a mode are its options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.peers.envs import LLAMA_CPP, OPENVINO, TRANSFORMERS
from paceline.errors import InvalidParameter

__all__ = ["DEFAULT_ARMS", "ENGINES", "PACELINE", "PLAIN", "Arm", "Engine", "parse_arm"]

PACELINE, PLAIN = "paceline", "plain"
_ARM = re.compile(r"(?P<engine>[^:]+):(?P<weights>[^:*]+):(?P<mode>[^:*]+)(\*(?P<streams>[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Engine:
    """program   its child, in `children/`
    weights   what it can hold the model's weights in; None: whatever it accepts itself
    modes     name -> how many numbers may follow
    batches   whether it answers several prompts at once
    """

    program: str
    weights: tuple[str, ...] | None
    modes: Mapping[str, int]
    batches: bool = True


ENGINES = {
    PACELINE: Engine("paceline_child.py", None, {PLAIN: 0, "auto": 0, "auto+draft": 0}),
    LLAMA_CPP: Engine(
        "llamacpp_child.py",
        ("file", "Q8_0", "F16", "BF16"),
        {
            PLAIN: 0,
            "ngram-simple": 2,
            "ngram-map-k": 2,
            "ngram-map-k4v": 2,
            "ngram-cache": 1,
            "ngram-mod": 3,
            "draft": 2,
        },
    ),
    OPENVINO: Engine("openvino_child.py", ("fp16", "int8", "int4"), {PLAIN: 0, "sdpa": 0, "lookup": 1, "draft": 1}),
    TRANSFORMERS: Engine("transformers_child.py", ("bfloat16", "float32"), {PLAIN: 0, "lookup": 1, "draft": 0}, False),
}

DEFAULT_ARMS = (
    "paceline:bfloat16:plain",
    "paceline:bfloat16:auto",
    "openvino:fp16:plain",
    "openvino:fp16:lookup/10",
    "openvino:int8:plain",
    "openvino:int8:lookup/10",
    "llama.cpp:file:plain",
    "llama.cpp:file:ngram-mod/8/4/16",
    "transformers:bfloat16:plain",
    "transformers:bfloat16:lookup/10",
)


@dataclass(frozen=True, slots=True)
class Arm:
    engine: str
    weights: str
    mode: str
    streams: int = 1

    def __str__(self) -> str:
        return f"{self.engine}:{self.weights}:{self.mode}" + (f"*{self.streams}" if self.streams > 1 else "")

    @property
    def wants_draft(self) -> bool:
        return self.mode.partition("/")[0] in ("draft", "auto+draft")

    @property
    def plain(self) -> Arm:
        """The arm whose text this one should repeat: the same engine and weights, undrafted, one stream."""
        return Arm(self.engine, self.weights, PLAIN)


def parse_arm(text: str) -> Arm:
    """Raises InvalidParameter with what is allowed."""
    match = _ARM.fullmatch(text)
    if match is None:
        raise InvalidParameter("arm", text, "ENGINE:WEIGHTS:MODE, or ENGINE:WEIGHTS:MODE*STREAMS")
    arm = Arm(match["engine"], match["weights"], match["mode"], int(match["streams"] or 1))
    engine = ENGINES.get(arm.engine)
    if engine is None:
        raise InvalidParameter("arm", text, f"engines {', '.join(ENGINES)}")
    if engine.weights is not None and arm.weights not in engine.weights:
        raise InvalidParameter("arm", text, f"weights {', '.join(engine.weights)} for {arm.engine}")
    name, *numbers = arm.mode.split("/")
    if len(numbers) > engine.modes.get(name, -1) or not all(re.fullmatch(r"\d+(\.\d+)?", n) for n in numbers):
        modes = ", ".join(f"{m}{'/N' * count}" for m, count in engine.modes.items())
        raise InvalidParameter("arm", text, f"modes {modes} for {arm.engine}")
    if arm.streams > 1 and not engine.batches:
        raise InvalidParameter("arm", text, f"one stream for {arm.engine}")
    return arm
