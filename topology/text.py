"""A machine in words: its matrix, its links, its best possible collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from linkweave.topology.graph import Graph
from linkweave.topology.link import KINDS, Link
from linkweave.topology.routes import Vertex

WIDEST = 64  # GPUs; a larger matrix helps nobody
LONGEST = 60  # lines of links
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
            "eleven", "twelve")  # fmt: skip


def number(n: int) -> str:
    """Small numbers in words."""
    return _NUMBERS[n] if n < len(_NUMBERS) else str(n)


def gpu_list(gpus: Sequence[int]) -> str:
    """GPUs 0, 1, 2, 3 and 7 as "0-3,7", in ascending order."""
    runs = groupby(enumerate(sorted(gpus)), key=lambda pair: pair[1] - pair[0])
    spans = [[gpu for _, gpu in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def describe(topology: Graph) -> str:
    """The summary, the matrix and what was assumed."""
    lines = [summary(topology)]
    if len(topology.gpus) <= WIDEST:
        lines += matrix(topology)
    else:
        lines.append(f"(matrix left out: more than {WIDEST} GPUs)")
    for told in topology.assumptions:
        lines.append(told if told.startswith("measured: ") else f"assumed: {told}")
    return "\n".join(lines)


def summary(topology: Graph) -> str:
    """One line: how many of what."""
    count: Counter[tuple[str, bool]] = Counter()
    for link, back in cables(topology.links):
        count[link.kind, back] += link.count
    n = len(topology.gpus)
    noun = "CPU rank" if _noun(topology) == "rank" else "GPU"
    parts = [f"{n} {noun}{'s'[: n != 1]}"]
    if topology.forwarders:
        parts.append(f"forwarding over GPU {gpu_list(topology.forwarders)}")
    for (kind, back), links in count.items():
        parts.append(f"{links} {KINDS[kind][links != 1]}{'' if back else ' one way'}")
    return f"{topology.name}: {', '.join(parts)}"


def cables(links: Sequence[Link]) -> Iterator[tuple[Link, bool]]:
    """Each link once, and whether an equal one leads back."""
    by_ends = {(k.src, k.dst): k for k in links}
    told: set[tuple[Vertex, Vertex]] = set()
    for link in links:
        back = by_ends.get((link.dst, link.src))
        same = back is not None and (back.kind, back.count, back.bandwidth) == (
            link.kind, link.count, link.bandwidth
        )  # fmt: skip
        if not same:
            yield link, False
        elif (link.dst, link.src) not in told:
            told.add((link.src, link.dst))
            yield link, True


def matrix(topology: Graph) -> list[str]:
    """The lines of a matrix as `nvidia-smi topo -m` prints it, by `Topology.cell`."""
    names = {g: f"{_noun(topology)}{g}" for g in topology.gpus}
    width = max(5, *(len(name) + 1 for name in names.values()))
    rows = [" " * width + "".join(name.rjust(width) for name in names.values())]
    for a, name in names.items():
        cells = "".join(topology.cell(a, b).rjust(width) for b in names)
        rows.append(name.ljust(width) + cells)
    return rows


def _noun(topology: Graph) -> str:
    return "rank" if topology.on_memory else "GPU"


def link_table(topology: Graph) -> list[str]:
    """A line for each cable; for each sort of cable where there are many."""
    rows: list[tuple[str, ...]] = []
    every = list(cables(topology.links))
    if len(every) <= LONGEST:
        for link, back in every:
            arrow = "-" if back else "->"
            ends = f"{vertex(link.src)} {arrow} {vertex(link.dst)}"
            rows.append((ends.replace("GPU", _noun(topology)), *_figures(link)))
    else:
        sorts = Counter((_sort(k.src), _sort(k.dst), back, *_figures(k)) for k, back in every)
        for (a, b, back, *figures), n in sorts.items():
            rows.append((f"{n} of {a} {'-' if back else '->'} {b}", *figures))
    widths = [max(len(row[i]) for row in rows) for i in range(4)] if rows else []
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _figures(link: Link) -> tuple[str, str, str]:
    one = f"{link.bandwidth / 1e9:g} GB/s"
    rate = f"{link.count} x {one} = {link.count * link.bandwidth / 1e9:g} GB/s"
    return KINDS[link.kind][0], rate if link.count > 1 else one, f"{link.latency_us:.3g} us"


def vertex(v: Vertex) -> str:
    """ "GPU 3", or the switch's name."""
    return f"GPU {v}" if isinstance(v, int) else v


def _sort(v: Vertex) -> str:
    return "GPU" if isinstance(v, int) else re.sub(r"\d+", "*", v)
