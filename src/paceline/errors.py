"""Every exception Paceline raises on purpose.

    PacelineError
    ├── UsageError            the caller's mistake: exit code 2 on the command line
    │   ├── InvalidParameter  a value outside what is allowed
    │   ├── ModelNotFound     no model under that name or path
    │   ├── ModelFormatError  the files are there and cannot be read as a model
    │   ├── UnsupportedModel  read, and refused by name
    │   ├── IncompatibleDraft the draft cannot propose for this target
    │   ├── ContextOverflow   the prompt leaves no room in the context
    │   ├── RequestTooLarge   the request needs more memory than the cache has
    │   └── MissingExtra      an optional dependency is not installed
    ├── Infeasible            a well-formed question without an answer: exit code 3
    └── RequestFailed         one request failed at run time; the others go on

A message says what was given, what is allowed, and what to do next. Anything else that escapes is our bug.
"""

from __future__ import annotations

__all__ = [
    "ContextOverflow",
    "IncompatibleDraft",
    "Infeasible",
    "InvalidParameter",
    "MissingExtra",
    "ModelFormatError",
    "ModelNotFound",
    "PacelineError",
    "RequestFailed",
    "RequestTooLarge",
    "UnsupportedModel",
    "UsageError",
]


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""

    exit_code = 1


class UsageError(PacelineError):
    """The call or its input is wrong; nothing was done."""

    exit_code = 2


class InvalidParameter(UsageError):
    """A parameter lies outside its allowed values."""

    def __init__(self, name: str, given: object, allowed: str, hint: str = "") -> None:
        self.name, self.given, self.allowed = name, given, allowed
        super().__init__(f"{name} is {given!r}; allowed: {allowed}." + (f" {hint}" if hint else ""))


class ModelNotFound(UsageError):
    """No model lies under the given name or path."""


class ModelFormatError(UsageError):
    """The files exist and are not a model Paceline can read (truncated, no weights, pickle only)."""


class UnsupportedModel(UsageError):
    """The model was read and its kind cannot be decoded exactly yet."""


class IncompatibleDraft(UsageError):
    """The draft's tokens do not mean what the target's tokens mean."""


class ContextOverflow(UsageError):
    """The prompt does not fit the context with room for one more token."""


class RequestTooLarge(UsageError):
    """The request needs more memory than there is, even alone."""


class MissingExtra(UsageError):
    """An optional dependency is needed for this call."""


class Infeasible(PacelineError):
    """The question is well formed and nothing satisfies it."""

    exit_code = 3


class RequestFailed(PacelineError):
    """One request failed while it ran; other requests are not affected."""
