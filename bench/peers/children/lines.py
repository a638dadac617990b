"""A child's end of the protocol: one JSON object a line in, one out. Standard library only.

Requests are `{"op": NAME, ...}` on stdin; the answer is what the handler of that name returns, or `{"error": TEXT}`, on
the descriptor that the first argument names: libraries print to stdout as they please.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("op")](**request)
        except Exception as error:  # the parent decides what a failure means; it is never dropped
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer(token_ids: list[int], first_s: float, decode_s: float, tokens: int | None = None) -> dict[str, Any]:
    """One text. `tokens`: how many were computed, where that is more than are given (an end token left out)."""
    return {
        "token_ids": token_ids,
        "tokens": len(token_ids) if tokens is None else tokens,
        "first_s": first_s,
        "decode_s": decode_s,
    }
