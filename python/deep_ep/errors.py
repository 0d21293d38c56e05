"""Errors of the package: one class, and subclasses that are also Python's own kinds."""

from __future__ import annotations

OK = 0
INVALID_ARGUMENT = 1
INVALID_STATE = 2
UNSUPPORTED = 3
OUT_OF_MEMORY = 4
SYSTEM = 5
TIMEOUT = 6
PEER_DEAD = 7
MISMATCH = 8
ABORTED = 9
NOT_FOUND = 10
VERSION = 11
FORK = 12
PENDING = 13
DEVICE = 14
INTERNAL = 15


class DeepEPError(RuntimeError):
    """A call failed.

    Attributes:
        status: the code of ``deepep.h`` (``DEEPEP_ERROR_*``), e.g. ``errors.TIMEOUT``.
        message: what happened, with the argument or the rank that caused it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def __reduce__(self) -> tuple[type[DeepEPError], tuple[int, str]]:
        return type(self), (self.status, self.message)


class DeepEPValueError(DeepEPError, ValueError):
    """An argument has a wrong value or shape."""


class DeepEPTypeError(DeepEPError, TypeError):
    """An argument has a wrong type or dtype."""


class DeepEPAssertionError(DeepEPError, AssertionError):
    """A condition that V1 of the API checks with ``assert``."""


class DeepEPNotImplementedError(DeepEPError, NotImplementedError):
    """A keyword that only a fork of the API knows."""


def value_error(name: str, given: object, allowed: str) -> DeepEPValueError:
    """The error for an argument whose value is not allowed."""
    return DeepEPValueError(INVALID_ARGUMENT, f"argument {name}: got {given}, allowed {allowed}")


def type_error(name: str, given: object, allowed: str) -> DeepEPTypeError:
    """The error for an argument whose type is not allowed."""
    return DeepEPTypeError(INVALID_ARGUMENT, f"argument {name}: got {given}, allowed {allowed}")


def check_int(name: str, value: object, least: int, most: int = 2**31 - 1) -> int:
    """`value` if it is an int from `least` to `most`; else the error that names it. ctypes cuts larger ones off."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(name, repr(value), "an int")
    if not least <= value <= most:
        raise value_error(name, value, f"an int from {least} to {most}")
    return value


def assertion(condition: bool, message: str) -> None:
    """Raises DeepEPAssertionError with `message` unless `condition` holds; works under ``python -O`` too."""
    if not condition:
        raise DeepEPAssertionError(INVALID_ARGUMENT, message)


def from_status(status: int, message: str) -> DeepEPError:
    """The exception for a status code of the library."""
    if status == INVALID_ARGUMENT:
        return DeepEPValueError(status, message)
    return DeepEPError(status, message)
