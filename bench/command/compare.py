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

from linkweave.bench.command import options
from linkweave.bench.command.options import JsonOption, console
from linkweave.collectives import CollectiveError
from linkweave.topology.checks import number, shown

TIME = re.compile(r"(.*_)?(seconds|ms|us|s)")  # measured fields: the less, the better
NOT_MEASURED = re.compile(r"predicted.*|model_.*|best_.*|worst_.*|compute.*")
OTHERS = re.compile(r"(gloo|ddp|dense)_.*")  # times of others in a row of ours
OUTCOMES = ("state", "wrong", "num_chunks", "all_reduces", "steps", "count", "program")
"""Fields of a row that are no part of what was asked for."""
LEAST = 0.02  # a change below this share is noise, even where a row's rounds differ by less
PEERS = ("library", "implementation", "backend", "embedding", "hook")
"""Fields that tell our rows from others'."""
OURS = re.compile(r".*linkweave|columns|g?top-?k|all-gather and sum", re.IGNORECASE)
"""What the names of our rows match from their beginning."""
FASTER, SLOWER, SAME, WRONG = "faster", "slower", "within noise", "wrong"
PARAMETERS = ("density",)  # fields with fractions that are part of what was asked for
Row = Mapping[str, Any]
Key = tuple[tuple[str, Any], ...]
LEGEND = """\
ratio: B's time over A's; drift: what others' rows changed by, which is the machine's doing and is
taken out of the verdict. A row with a best and a worst round is slower, or faster, if that range
leaves out the other's median, by 2 % or more; the rest if it changed by more than --noise."""


@dataclass(frozen=True, slots=True)
class Change:
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
        float,
        typer.Option(
            help="By how much a time without a best and a worst round may change: a share of it."
        ),
    ] = 0.1,
    fail: Annotated[
        bool,
        typer.Option(
            "--fail-on-slower",
            help="Exit with status 1 if something is slower, wrong or no longer there.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of one benchmark; know noise from change."""
    number(noise, "--noise", 0, 10)
    one, other = read(before), read(after)
    for words in differences(one, other):
        console.print(f"warning: {words}", highlight=False, soft_wrap=True)
    first, second = by_key(one["rows"], before), by_key(other["rows"], after)
    drift, found = changes(first, second, noise)
    lost, new = left_out(first, second), left_out(second, first)
    wrong = [_words(key) for key, row in second.items() if row.get("wrong")]
    if not found:
        why = "no time in common" if {*first} & {*second} else "no row in common"
        raise CollectiveError(f"{before} and {after} have {why}")
    if as_json:
        print(json.dumps({
            "drift": drift, "changes": [asdict(change) for change in found],
            "only_before": lost, "only_after": new, "wrong_after": wrong,
        }))  # fmt: skip
    else:
        print(table(drift, found))
        for words, rows in (
            (f"only in {before}", lost), (f"only in {after}", new), (f"wrong in {after}", wrong),
        ):  # fmt: skip
            if rows:
                print("\n  ".join([f"{words}: {len(rows)}", *rows]))
    if fail and (lost or wrong or any(change.verdict == SLOWER for change in found)):
        raise SystemExit(1)


def read(path: Path) -> dict[str, Any]:
    """The file, whose rows are objects. Raises CollectiveError."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
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


def by_key(rows: Sequence[Row], where: Path) -> dict[Key, Row]:
    """The rows by what was asked for. Raises CollectiveError if nothing tells two of them apart."""
    found: dict[Key, Row] = {}
    for row in rows:
        key = _key(row)
        if key in found:
            raise CollectiveError(f"{where}: nothing tells two rows apart: {shown(_words(key))}")
        found[key] = row
    return found


def changes(
    before: Mapping[Key, Row], after: Mapping[Key, Row], noise: float
) -> tuple[float, list[Change]]:
    """The drift, and each measured field of the rows that both have."""
    pairs = [(key, row, after[key]) for key, row in before.items() if key in after]
    ratios = [
        new[name] / old[name]
        for _, old, new in pairs
        for name in _measured(old, new) if _is_peer(old) or OTHERS.fullmatch(name)
    ]  # fmt: skip
    drift = median(ratios) if ratios else 1.0
    found = []
    for key, old, new in pairs:
        for name in _measured(old, new):
            if OTHERS.fullmatch(name):
                continue
            found.append(Change(
                _words(key), name, old[name], new[name], new[name] / old[name],
                WRONG if new.get("wrong") else _verdict(old, new, name, drift, noise),
            ))  # fmt: skip
    return drift, found


def left_out(one: Mapping[Key, Row], other: Mapping[Key, Row]) -> list[str]:
    """What only the first has: rows, and times of rows that both have."""
    found = []
    for key, row in one.items():
        if key not in other:
            found.append(_words(key))
        else:
            gone = [name for name in _measured(row, row) if other[key].get(name) is None]
            found += [f"{_words(key)} {name}" for name in gone]
    return found


def _key(row: Row) -> Key:
    return tuple(
        (name, value)
        for name, value in row.items()
        if (isinstance(value, str | int) or (name in PARAMETERS and isinstance(value, float)))
        and name not in OUTCOMES
        and not TIME.fullmatch(name)
    )


def _words(key: Key) -> str:
    return " ".join(str(value) for _, value in key)


def _is_peer(row: Row) -> bool:
    names = [row[field] for field in PEERS if field in row]
    return bool(names) and not OURS.match(str(names[0]))


def _measured(old: Row, new: Row) -> list[str]:
    return [
        name
        for name, value in old.items()
        if TIME.fullmatch(name) and not NOT_MEASURED.fullmatch(name)
        and _positive(value) and _positive(new.get(name))
    ]  # fmt: skip


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _verdict(old: Row, new: Row, name: str, drift: float, noise: float) -> str:
    one, other = old[name], new[name] / drift
    rounds = [row.get(end) for row in (old, new) for end in ("best_us", "worst_us")]
    if name == "time_us" and all(map(_positive, rounds)):
        best, worst, low, high = rounds[0], rounds[1], rounds[2] / drift, rounds[3] / drift
        if low > one and other > max(worst, one * (1 + LEAST)):
            return SLOWER
        return FASTER if high < one and other < min(best, one / (1 + LEAST)) else SAME
    if other > one * (1 + noise):
        return SLOWER
    return FASTER if other < one / (1 + noise) else SAME


def table(drift: float, found: Sequence[Change]) -> str:
    rows = [
        (change.row, change.field, f"{change.before:.4g}", f"{change.after:.4g}",
         f"{change.ratio:.2f}", change.verdict) for change in found
    ]  # fmt: skip
    heads = ("row", "field", "A", "B", "ratio", "verdict")
    counts = ", ".join(
        f"{sum(change.verdict == kind for change in found)} {kind}"
        for kind in (SLOWER, FASTER, SAME, WRONG)
        if kind != WRONG or any(change.verdict == WRONG for change in found)
    )
    return (
        f"{options.table(heads, rows, (0, 1, 5), wrapped=(0,))}\n{LEGEND}\n\n"
        f"{counts}; drift {drift:.2f}"
    )
