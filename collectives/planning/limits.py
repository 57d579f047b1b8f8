"""Limits on the fields of a plan, and the check of plans read from JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.topology.checks import integer, shown
from linkweave.topology.json_reader import read_format

LIMITS = {"size": 1 << 16, "num_chunks": 1 << 20, "stride": 1 << 16, "slots": 64}
"""The largest values of these fields; the smallest value is 1."""
MOST_CELLS = 1 << 20
"""The most chunks of one group, counted on all ranks that have them."""
MOST_CHANNELS = 1 << 20
MOST_BYTES = 1 << 50
"""The largest message."""

_Check = Callable[[Any, str], object]
"""A function of a value and its name that raises PlanError."""


def read_json(source: str, ops: Collection[str]) -> dict[str, Any]:
    """Return the object that `Plan.to_json` wrote, after checking the type and range of each field.

    Every rank, channel, chunk and connection number names one that the plan has. Raises PlanError.
    """
    data = read_format(source, "linkweave-plan", "plan JSON", PlanError)
    try:
        for name, check in _checks(data, ops).items():
            check(data[name], name)
    except KeyError as error:
        raise PlanError(f"plan JSON lacks {error}") from None
    except PlanError as error:
        raise PlanError(f"plan JSON: {error}") from None
    return data


def _checks(data: dict[str, Any], ops: Collection[str]) -> dict[str, _Check]:
    for name, most in LIMITS.items():
        integer(data[name], name, 1, most, PlanError)
    ranks, channels = _below(data["size"]), _below(MOST_CHANNELS)
    count = len(data["connections"]) if isinstance(data["connections"], list) else 0
    connection, truth, word = _below(count), _one_of(True, False), _kind(str, "a string")
    word(data["collective"], "collective")
    kind = COLLECTIVES.get(data["collective"])
    steps = _list(
        _row(
            _one_of(*ops), _list(connection, least=1), _below(data["stride"]),
            _or_none(connection), truth, _below(count + 1),
        )
    )  # fmt: skip
    return {
        "algorithm": word,
        "exclusive": truth,
        "root": _list(_row(ranks, ranks)) if kind and kind.root == "pairs" else ranks,
        "notes": _list(word),
        "trees": _list(_list(ranks)),
        "detours": _list(_list(ranks, least=3)),
        "connections": _list(_row(ranks, channels, ranks, channels, _list(_vertex))),
        "tracks": _list(_row(ranks, channels, _list(steps))),
    }


def _below(end: int) -> _Check:
    return lambda value, name: integer(value, name, 0, end - 1, PlanError)


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
