"""What the fields of a plan may be: limits, and a check of plans that come as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from linkweave.collectives.errors import PlanError

LIMITS = {"size": 1 << 16, "num_chunks": 1 << 20, "stride": 1 << 16, "slots": 64}
"""What these fields of a plan are at most; at least they are 1."""
MOST_CELLS = 1 << 20
"""Chunks of one group on all ranks together."""
MOST_CHANNELS = 1 << 20
MOST_BYTES = 1 << 50
"""Of a message."""
_SHOWN = 40  # characters

_Check = Callable[[Any, str], object]
"""Takes a value and its name; raises PlanError."""


def whole(value: object, name: str, least: int, most: int) -> None:
    """Raise PlanError unless the value is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(f"{name} must be an integer from {least} to {most}, not {shown(value)}")


def shown(value: object) -> str:
    """A value in words: its repr, or where that may be long what it is."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and abs(value) >> 128:
        return f"an integer of {value.bit_length()} bits"
    words = repr(value)
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def check_json(data: object, ops: Collection[str]) -> None:
    """Raise PlanError unless this is a plan as `Plan.to_json` writes it, in which every number is
    of something that the plan has."""
    if not isinstance(data, dict) or data.get("format") != "linkweave-plan":
        raise PlanError('plan JSON needs "format": "linkweave-plan" at the top')
    if data.get("version") != 1:
        raise PlanError(f"plan JSON: version {shown(data.get('version'))} is unknown; known: 1")
    try:
        for name, check in _checks(data, ops).items():
            check(data[name], name)
    except KeyError as error:
        raise PlanError(f"plan JSON lacks {error}") from None
    except PlanError as error:
        raise PlanError(f"plan JSON: {error}") from None


def _checks(data: dict[str, Any], ops: Collection[str]) -> dict[str, _Check]:
    """The check of each field."""
    for name, most in LIMITS.items():
        whole(data[name], name, 1, most)
    ranks, channels = _below(data["size"]), _below(MOST_CHANNELS)
    count = len(data["connections"]) if isinstance(data["connections"], list) else 0
    connection, truth, word = _below(count), _one_of(True, False), _kind(str, "a string")
    steps = _list(
        _row(
            _one_of(*ops), _list(connection, least=1), _below(data["stride"]),
            _or_none(connection), truth, _below(count + 1),
        )
    )  # fmt: skip
    return {
        "algorithm": word,
        "collective": word,
        "exclusive": truth,
        "root": _list(_row(ranks, ranks)) if data["collective"] == "sendrecv" else ranks,
        "notes": _list(word),
        "trees": _list(_list(ranks)),
        "detours": _list(_list(ranks, least=3)),
        "connections": _list(_row(ranks, channels, ranks, channels, _list(_vertex))),
        "tracks": _list(_row(ranks, channels, _list(steps))),
    }


def _below(end: int) -> _Check:
    return lambda value, name: whole(value, name, 0, end - 1)


def _one_of(*allowed: object) -> _Check:
    def check(value: object, name: str) -> None:
        if not any(value is x or (isinstance(x, str) and value == x) for x in allowed):
            words = ", ".join(map(str, allowed))
            raise PlanError(f"{name} must be one of {words}, not {shown(value)}")

    return check


def _kind(kind: type, words: str) -> _Check:
    def check(value: object, name: str) -> None:
        if not isinstance(value, kind):
            raise PlanError(f"{name} must be {words}, not {shown(value)}")

    return check


_is_list = _kind(list, "a list")


def _list(check: _Check, least: int = 0) -> _Check:
    def check_all(value: Any, name: str) -> None:
        _is_list(value, name)
        if len(value) < least:
            raise PlanError(f"{name} must have at least {least} items, not {len(value)}")
        for i, item in enumerate(value):
            check(item, f"{name}[{i}]")

    return check_all


def _row(*checks: _Check) -> _Check:
    def check_each(value: Any, name: str) -> None:
        _is_list(value, name)
        if len(value) != len(checks):
            raise PlanError(f"{name} must have {len(checks)} items, not {len(value)}")
        for i, (check, item) in enumerate(zip(checks, value, strict=True)):
            check(item, f"{name}[{i}]")

    return check_each


def _or_none(check: _Check) -> _Check:
    return lambda value, name: value is None or check(value, name)


def _vertex(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{name} must be a GPU or the name of a switch, not {shown(value)}")
