"""`linkweave bench compare`: two files of one benchmark, and whether the second is slower."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from linkweave.bench import options
from linkweave.bench.options import JsonOption, console
from linkweave.collectives import CollectiveError
from linkweave.topology.checks import number, shown

TIME = re.compile(r"(.*_)?(seconds|ms|us|s)")
"""Measured fields: the less, the better."""
NOT_MEASURED = re.compile(r"predicted.*|model.*|best_.*|worst_.*|compute.*")
OUTCOMES = ("state", "wrong", "num_chunks", "all_reduces", "steps", "count")
"""Fields of a row that are no part of what was asked for."""
PEERS = ("library", "implementation", "backend")
"""Fields that tell our rows, which contain "linkweave", from others'."""
FASTER, SLOWER, SAME = "faster", "slower", "within noise"
LEGEND = """\
ratio: B's time over A's; drift: what others' rows changed by, which is the machine's doing and is
taken out of the verdict. A row with a best and a worst round is slower, or faster, if that range
leaves out the other's median; the rest if it changed by more than the noise."""


@dataclass(frozen=True, slots=True)
class Change:
    """A measured field of a row in both files."""

    row: str
    field: str
    before: float
    after: float
    ratio: float
    verdict: str


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="What a benchmark wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="A later run of it.")],
    noise: Annotated[
        float, typer.Option(help="The share by which times of one machine differ at most.")
    ] = 0.1,
    fail: Annotated[
        bool, typer.Option("--fail-on-slower", help="Exit with status 1 if something is slower.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of one benchmark; know noise from change."""
    number(noise, "--noise", 0, 10)
    one, other = read(before), read(after)
    for words in differences(one, other):
        console.print(f"warning: {words}", highlight=False, soft_wrap=True)
    drift, found = changes(one["rows"], other["rows"], noise)
    if not found:
        raise CollectiveError(f"{before} and {after} have no row in common")
    if as_json:
        print(json.dumps({"drift": drift, "changes": [asdict(change) for change in found]}))
    else:
        print(table(drift, found))
    if fail and any(change.verdict == SLOWER for change in found):
        raise SystemExit(1)


def read(path: Path) -> dict[str, Any]:
    """The file, whose rows are objects. Raises CollectiveError."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CollectiveError(f"{path} is not JSON: {error}") from None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CollectiveError(
            f"{path} must be an object with a list of rows, as bench --out writes"
        )
    return data


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between the machines, in words; their dates may."""
    found = []
    pair = [file.get("machine") for file in (one, other)]
    if not all(isinstance(machine, dict) for machine in pair):
        return [] if pair[0] == pair[1] else [f"the machines are {pair[0]} and {pair[1]}"]
    first, second = pair
    for name in sorted({*first, *second} - {"date"}):
        if first.get(name) != second.get(name):
            found.append(f"{name}: {shown(first.get(name))} and {shown(second.get(name))}")
    return found


def changes(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], noise: float
) -> tuple[float, list[Change]]:
    """The drift, and each measured field of the rows that both have."""
    later = {_key(row): row for row in after}
    pairs = [(row, later[_key(row)]) for row in before if _key(row) in later]
    ratios = [
        new[name] / old[name]
        for old, new in pairs if _is_peer(old) for name in _measured(old, new)
    ]  # fmt: skip
    drift = median(ratios) if ratios else 1.0
    found = []
    for old, new in pairs:
        words = " ".join(str(value) for _, value in _key(old))
        for name in _measured(old, new):
            ratio = new[name] / old[name]
            found.append(Change(
                words, name, old[name], new[name], ratio, _verdict(old, new, name, drift, noise)
            ))  # fmt: skip
    return drift, found


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in row.items()
        if isinstance(value, str | int | None) and name not in OUTCOMES
    )


def _is_peer(row: Mapping[str, Any]) -> bool:
    names = [row[field] for field in PEERS if field in row]
    return bool(names) and "linkweave" not in str(names[0])


def _measured(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in old.items()
        if TIME.fullmatch(name) and not NOT_MEASURED.fullmatch(name)
        and isinstance(value, float) and isinstance(new.get(name), float)
        and value > 0 and new[name] > 0
    ]  # fmt: skip


def _verdict(
    old: Mapping[str, Any], new: Mapping[str, Any], name: str, drift: float, noise: float
) -> str:
    one, other = old[name], new[name] / drift
    if name == "time_us" and all("best_us" in row and "worst_us" in row for row in (old, new)):
        low, high = new["best_us"] / drift, new["worst_us"] / drift
        if low > one and other > old["worst_us"]:
            return SLOWER
        return FASTER if high < one and other < old["best_us"] else SAME
    if other > one * (1 + noise):
        return SLOWER
    return FASTER if other < one / (1 + noise) else SAME


def table(drift: float, found: Sequence[Change]) -> str:
    """All changes, and how many of each kind."""
    rows = [
        (change.row, change.field, f"{change.before:.4g}", f"{change.after:.4g}",
         f"{change.ratio:.2f}", change.verdict) for change in found
    ]  # fmt: skip
    heads = ("row", "field", "A", "B", "ratio", "verdict")
    counts = ", ".join(
        f"{sum(change.verdict == kind for change in found)} {kind}"
        for kind in (SLOWER, FASTER, SAME)
    )
    return (
        f"{options.table(heads, rows, (0, 1, 5), wrapped=(0,))}\n{LEGEND}\n\n"
        f"{counts}; drift {drift:.2f}"
    )
