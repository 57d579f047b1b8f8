"""Readers of JSON, whose errors say where a text is malformed."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

from linkweave.topology.checks import shown
from linkweave.topology.errors import CollectiveError, TopologyError

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
        raise error(f'{where}: needs "format": "{name}" at the top')
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
