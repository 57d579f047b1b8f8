"""Checks of arguments that every package shares, and how their error messages show a value."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex, cast

from linkweave.topology.errors import CollectiveError

_MAX_SHOWN = 40  # characters


def integer(
    value: object, name: str, least: int | None = None, most: int | None = None,
    error: type[CollectiveError] = CollectiveError,
) -> int:  # fmt: skip
    """Return `value` as an int; NumPy's and torch's integers are accepted, bools are not.

    Raises `error` unless the value is an integer from `least` to `most`, as far as these are given.
    """
    try:
        truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        found = None if truth else index(cast(SupportsIndex, value))
    except TypeError:
        found = None
    if (
        found is None
        or (least is not None and found < least)
        or (most is not None and found > most)
    ):
        allowed = "" if least is None else f" of at least {least}"
        if least is not None and most is not None:
            allowed = f" from {least} to {most}"
        raise error(f"{name} must be an integer{allowed}, not {shown(value)}")
    return found


def number(
    value: object, name: str, least: float, most: float,
    error: type[CollectiveError] = CollectiveError,
) -> float:  # fmt: skip
    """Return `value`; raises `error` unless it is an int or a float from `least` to `most`."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not least <= cast(float, value) <= most:
        raise error(f"{name} must be a number from {least:g} to {most:g}, not {shown(value)}")
    return cast(float, value)


def shown(value: object) -> str:
    """Return the value's repr, or a description where the repr may be long."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and abs(value) >> 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
