"""Rendering a chat template: Jinja from an untrusted file, so in a sandbox that cannot change its inputs.

The environment is the one Transformers renders templates in: trimmed blocks, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII text, and `{% generation %}` as a mere
bracket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ModelFormatError, UsageError

__all__ = ["render_template"]


# What a template's own code may raise over messages it does not expect.
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, str],  # bos_token, eos_token and their like
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """The prompt text for `messages`. Raises UsageError where the template refuses them."""
    template = _compile(source)
    try:
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            strftime_now=lambda form: now().strftime(form),
            **variables,
        )
    except _REFUSALS as error:
        raise UsageError(f"the model's chat template refuses these messages: {error}.") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ModelFormatError(
            f"the model's chat template is not valid Jinja (line {error.lineno}: {error.message})."
        ) from error


class _Generation(Extension):
    """`{% generation %} ...` marks the model's own words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind jinja2 asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
