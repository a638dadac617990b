"""The promise that users see, asked of a whole `LLM`: drafted text is plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.sampling import SamplingParams
from paceline.decode.llm import LLM
from paceline.decode.sequence import DraftSettings

__all__ = ["check_texts_are_plain"]


def check_texts_are_plain(llm: LLM, prompts: Sequence[str]) -> None:
    """Any drafter and length, alone and twice all together, greedy and sampled with a seed; something is drafted."""
    for params in (
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=24, temperature=0.8, seed=5),
    ):
        plain = [llm.generate(p, params, draft=DraftSettings("none"))[0].completions[0].token_ids for p in prompts]
        drafted = 0
        for draft in (DraftSettings("auto"), DraftSettings("suffix", 4), DraftSettings("suffix", 15)):
            outputs = llm.generate([*prompts, *prompts], params, draft=draft)
            assert [output.completions[0].token_ids for output in outputs] == plain * 2
            drafted += sum(output.completions[0].stats.drafted for output in outputs)
        assert drafted
