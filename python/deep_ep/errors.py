"""Errors of the package: one class, and subclasses that are also Python's own kinds."""

from __future__ import annotations

import operator
import os
import warnings
from typing import Any

from . import _abi

OK = _abi.OK
INVALID_ARGUMENT = _abi.ERROR_INVALID_ARGUMENT
INVALID_STATE = _abi.ERROR_INVALID_STATE
UNSUPPORTED = _abi.ERROR_UNSUPPORTED
OUT_OF_MEMORY = _abi.ERROR_OUT_OF_MEMORY
SYSTEM = _abi.ERROR_SYSTEM
TIMEOUT = _abi.ERROR_TIMEOUT
PEER_DEAD = _abi.ERROR_PEER_DEAD
MISMATCH = _abi.ERROR_MISMATCH
ABORTED = _abi.ERROR_ABORTED
NOT_FOUND = _abi.ERROR_NOT_FOUND
VERSION = _abi.ERROR_VERSION
FORK = _abi.ERROR_FORK
PENDING = _abi.PENDING
DEVICE = _abi.ERROR_DEVICE
INTERNAL = _abi.ERROR_INTERNAL


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
    """A keyword that only a fork of the API has."""


def value_error(name: str, given: object, allowed: str) -> DeepEPValueError:
    """The error for an argument whose value is not allowed."""
    return DeepEPValueError(INVALID_ARGUMENT, f"argument {name}: got {given}, allowed {allowed}")


def switch(variable: str) -> bool:
    """A setting of the environment that is 0 or 1; 1 where it is not set, or empty."""
    text = os.environ.get(variable, "").strip() or "1"
    if text not in ("0", "1"):
        raise DeepEPValueError(INVALID_ARGUMENT, f"variable {variable}: got {text!r}, allowed 0 or 1")
    return text == "1"


def type_error(name: str, given: object, allowed: str) -> DeepEPTypeError:
    """The error for an argument whose type is not allowed."""
    return DeepEPTypeError(INVALID_ARGUMENT, f"argument {name}: got {given}, allowed {allowed}")


def check_int(name: str, value: object, minimum: int = -(2**31), maximum: int = 2**31 - 1) -> int:
    """`value` as an int, if it is an integer from `minimum` to `maximum`; else the error that names it.

    Integers are what has ``__index__``, NumPy's too, but not bools. The default range is a C field's: ctypes would cut
    off what does not fit. What else is allowed is for the library's plan to check.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise type_error(name, repr(value), "an int") from None
    if not minimum <= number <= maximum:
        raise value_error(name, number, f"an int from {minimum} to {maximum}")
    return number


_WARNED: set[str] = set()


def no_effect(option: str, reason: str) -> None:
    """Warns, once a process, of an option that was asked for and has no effect."""
    if option not in _WARNED:
        _WARNED.add(option)
        warnings.warn(f"{option} has no effect: {reason}", stacklevel=3)


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool, if it is one: True, False, 0, 1, NumPy's, or None for False; else the error that names it."""
    if (
        value is None or isinstance(value, (bool, int)) or type(value).__name__ in ("bool_", "bool")
    ):  # numpy's two names
        return bool(value)
    raise type_error(name, repr(value), "a bool")


def check_handle(handle: object, lengths: tuple[int, ...], maker: str) -> tuple[Any, ...] | list[Any]:
    """`handle` if it is a tuple or list of one of the lengths; else the error. `maker`: the method that returns one."""
    if isinstance(handle, (tuple, list)):
        if len(handle) in lengths:
            return handle
        given = f"a {type(handle).__name__} of {len(handle)}"
    else:
        given = type(handle).__name__
    raise type_error("handle", given, f"the handle that {maker} returned")


def assertion(condition: bool, message: str) -> None:
    """Raises DeepEPAssertionError with `message` unless `condition` holds; works under ``python -O`` too."""
    if not condition:
        raise DeepEPAssertionError(INVALID_ARGUMENT, message)


def from_status(status: int, message: str) -> DeepEPError:
    """The exception for a status code of the library."""
    if status == INVALID_ARGUMENT:
        return DeepEPValueError(status, message)
    return DeepEPError(status, message)
