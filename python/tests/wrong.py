"""Runs a call with one wrong argument after another and reports where the refusal is missing or unclear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Wrong = tuple[str, dict[str, Any], tuple[str, ...]]  # what is wrong, the changed arguments, words of the text

ALLOWED_KINDS = ("ValueError", "TypeError", "AssertionError", "RuntimeError", "NotImplementedError")


def refusals(call: Callable[..., Any], good: dict[str, Any], wrong: list[Wrong]) -> list[str]:
    """Complaints about ``call(**good | changes)`` for each entry of ``wrong``; an empty list means all is well."""
    complaints = []
    for label, changes, words in wrong:
        try:
            call(**{**good, **changes})
        except Exception as error:  # noqa: BLE001 - the kind is what is judged
            complaints += [f"{label}: {text}" for text in judge(error, words)]
        else:
            complaints.append(f"{label}: accepted")
    return complaints


def judge(error: Exception, words: tuple[str, ...]) -> list[str]:
    """What is wrong with a refusal: its class, or a word that its text lacks."""
    from deep_ep import DeepEPError

    text = str(error)
    complaints = []
    if not isinstance(error, (DeepEPError, ValueError, TypeError)):
        complaints.append(f"raised {type(error).__name__}: {text}")
    for word in words:
        if word not in text:
            complaints.append(f"the text lacks {word!r}: {text}")
    if not words:
        complaints.append("the test expects no word")
    return complaints
