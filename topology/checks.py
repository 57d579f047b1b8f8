"""Checks of arguments that every package shares, and how their error messages show a value."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast


class CollectiveError(Exception):
    """Everything linkweave raises on purpose derives from this."""


class TopologyError(CollectiveError):
    """A machine that is unknown, malformed, or cannot do what was asked of it."""


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


T = TypeVar("T")


def parse_json(text: str, where: str, error: type[CollectiveError] = TopologyError) -> Any:
    """Return what the JSON holds. Raises `error`, which begins with `where`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as found:
        at = f"line {found.lineno} column {found.colno}"
        raise error(f"{where}: {at}: {found.msg}") from None
    except (ValueError, RecursionError) as found:  # a number, or a nest, of thousands
        raise error(f"{where}: {found}") from None


def read_format(
    text: str, name: str, where: str, error: type[CollectiveError] = TopologyError
) -> dict[str, Any]:
    """Return an object of format `name`, version 1. Raises `error`, which begins with `where`."""
    data = parse_json(text, where, error)
    if not isinstance(data, dict) or data.get("format") != name:
        other = data.get("format") if isinstance(data, dict) else None
        what = f"it is {shown(other)}" if isinstance(other, str) else "there is none"
        raise error(f'{where}: needs "format": "{name}" at the top, but {what}')
    if data.get("version") != 1:
        raise error(f"{where}: version {shown(data.get('version'))} is unknown; known: 1")
    return data


def records(kind: type[T], rows: object, name: str) -> tuple[T, ...]:
    """Return the dataclasses of a JSON list. Raises TopologyError that names a malformed entry."""
    if not isinstance(rows, list):
        raise TopologyError(f"{name} must be a list, not {shown(rows)}")
    return tuple(_record(kind, row, f"{name}[{i}]") for i, row in enumerate(rows))


def _record(kind: type[T], row: Any, name: str) -> T:
    try:
        return kind(**row)
    except TopologyError as error:
        raise TopologyError(f"{name}: {error}") from None
    except TypeError:
        known = fields(cast(Any, kind))
        needed = ", ".join(f'"{field.name}"' for field in known if field.default is MISSING)
        rest = ", ".join(f'"{field.name}"' for field in known if field.default is not MISSING)
        raise TopologyError(
            f"{name} must be an object with {needed}{f' and optionally {rest}' * bool(rest)}, "
            f"not {row!r:.200}"
        ) from None
