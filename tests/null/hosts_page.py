"""Writes docs/howto/between-machines.md from bench/results: python -m tests.null.hosts_page"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "between-machines.md"
BARE = 256 << 10  # bytes from which times without comparisons are shown
SHAPES, RATES = ("4x2", "2x4", "8x1"), ("1gbit", "10gbit")
PREDICTED = 1 << 20  # bytes from which predictions are shown
HEAD = """\
# Collectives between machines

<!-- Written by python -m tests.null.hosts_page -->

After this page you know where linkweave is faster than gloo between machines, where it is not, and
how far its predictions are off.

Machines are network namespaces on one computer with two cores ({machine}), {date}; links are shaped
by `tbf`. All ranks share these cores, under SCHED_BATCH, so that whatever takes a core's time costs
more than on machines of their own; at 10 Gbit/s the cores are busy all the time.

    python tests/net/hosts.py 4x2 1gbit bench network -c allreduce -c broadcast ... \\
        -b 256K -e 4M -r 5 --seconds 0.5

and likewise `-b 1K -e 64K -r 5 --seconds 0.15` and `-b 16M -e 64M -r 2 --seconds 0.3`.

A cell has the median of gloo's time over ours, by turns in the same ranks (above 1: linkweave is
faster); from 256 KiB, after a slash, the same with `comm.compares = False`; and from 1 MiB how far
the prediction (`ClusterMap.seconds`, from the same collective's times at other sizes, measured
before) is off: by more than 15 % in {off} of {predicted}. Sizes are of the whole message, as in
nccl-tests.

Of {cells} cells {slower} are more than 5 % slower than gloo, and {bare} with `compares = False`;
gloo, measured a second time in the same rounds, is more than 5 % slower than itself in {again}.
Before it is timed, its connections carry some long messages too, as linkweave's do for predictions:
over a connection that has carried them, short ones take longer.
gloo compares nothing; linkweave compares what ranks ask for with those that they hear from, before
a result can be read. A comparison of 8 machines costs the first rank of each about 0.6 ms of CPU
time for its 14 messages, and here four ranks share a core; gloo's own all-to-all of a word to each
takes as long.
"""


def record(shape: str, rate: str) -> dict[str, Any]:
    """What was measured on hosts of this shape and rate."""
    path = ROOT / "bench" / "results" / f"network-{shape}-{rate}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def cell(row: dict[str, Any]) -> str:
    words = f"{row['ratio']:.2f}"
    if row["nbytes"] >= BARE:
        words += f" / {row['bare']:.2f}"
    if row["nbytes"] >= PREDICTED:
        words += f" ({row['predicted'] / row['seconds'] - 1:+.0%})"
    return words


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table of collectives by sizes."""
    sizes = sorted({row["nbytes"] for row in rows})
    kinds = dict.fromkeys((row["collective"], row["op"]) for row in rows)
    lines = [f"| | {' | '.join(map(size, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for kind, op in kinds:
        of = {r["nbytes"]: r for r in rows if (r["collective"], r["op"]) == (kind, op)}
        name = f"{kind}, max" if op == "max" else kind
        lines.append(f"| {name} | {' | '.join(cell(of[n]) for n in sizes)} |")
    return lines


def page() -> str:
    records = {(shape, rate): record(shape, rate) for shape in SHAPES for rate in RATES}
    every = [row for found in records.values() for row in found["rows"]]
    large = [row for row in every if row["nbytes"] >= PREDICTED]
    first = next(iter(records.values()))
    lines = [HEAD.format(
        machine=first["machine"].partition(": ")[2], date=first["date"], cells=len(every),
        slower=sum(row["ratio"] < 0.95 for row in every),
        bare=sum(row["bare" if row["nbytes"] >= BARE else "ratio"] < 0.95 for row in every),
        again=sum(row["again"] < 0.95 for row in every),
        off=sum(abs(row["predicted"] / row["seconds"] - 1) > 0.15 for row in large),
        predicted=len(large),
    )]  # fmt: skip
    for (shape, rate), found in records.items():
        hosts, _, ranks = shape.partition("x")
        speed = rate.replace("gbit", " Gbit/s")
        lines += [f"## {hosts} machines of {ranks} ranks, {speed}", ""]
        start = found["map"]["startup_s"] * 1e3
        lines += [f"A comparison takes {start:.1f} ms.", "", *table(found["rows"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
