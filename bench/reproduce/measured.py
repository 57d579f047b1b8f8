"""Our measurements, as `bench/results` holds them, for tables beside papers' values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linkweave.bench import timing
from linkweave.bench.reproduce.rows import Row

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Recorded:
    """The rows of a file that a benchmark wrote; `where` has its date and machine."""

    name: str
    rows: tuple[dict[str, Any], ...]
    where: str

    def row(self, **fields: Any) -> dict[str, Any]:
        """The row that has these fields. Raises LookupError if there is none."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in fields.items()):
                return row
        raise LookupError(f"{self.name} has no row with {fields}")


def recorded(name: str) -> Recorded:
    """The file bench/results/NAME.json. Raises OSError if it is not there."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    machine = data["machine"]
    where = _words(machine) if isinstance(machine, dict) else f"{data['date']}, {machine}"
    return Recorded(name, tuple(data["rows"]), where)


def here() -> str:
    """Today, and this machine, in the words of `Recorded.where`."""
    return _words(timing.machine())


def _words(machine: dict[str, Any]) -> str:
    return f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores"


def measured(
    item: str, what: str, theirs: float | str | None, how: str, name: str,
    of: Callable[[Recorded], float | str], unit: str = "", reason: str = "",
) -> Row:  # fmt: skip
    """A row whose value comes from a recorded file, which the row names."""
    found = recorded(name)
    words = f"{reason}; " if reason else ""
    return Row(
        item, what, theirs, of(found), f"{how}, {found.where}", unit,
        f"{words}bench/results/{name}.json",
    )  # fmt: skip
