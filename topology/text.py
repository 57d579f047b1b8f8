"""Descriptions of a machine: a summary, a matrix, a table of links."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from linkweave.topology.graph import KINDS, Graph, Link, Vertex

WIDEST = 64  # GPUs; a larger matrix helps nobody
LONGEST = 60  # lines of links
COLUMNS = 100  # of a matrix
_CELLS = {
    "X": "itself", "NV#": "# NVLinks", "PIX": "one PCIe switch", "PXB": "several PCIe switches",
    "PHB": "one CPU", "SYS": "several CPUs", "NET": "a network", "MEM": "shared memory",
    "-": "only through other GPUs",
}  # fmt: skip
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
            "eleven", "twelve")  # fmt: skip


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """A table of facts for notebooks."""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def number(n: int) -> str:
    """A number, in words up to twelve."""
    return _NUMBERS[n] if n < len(_NUMBERS) else str(n)


def counted(n: int, noun: str) -> str:
    """ "1 channel", "2 channels"."""
    return f"{n} {noun}{'s'[: n != 1]}"


def gpu_list(gpus: Sequence[int]) -> str:
    """GPUs 0, 1, 2, 3 and 7 as "0-3,7", in ascending order."""
    runs = groupby(enumerate(sorted(gpus)), key=lambda pair: pair[1] - pair[0])
    spans = [[gpu for _, gpu in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def describe(topology: Graph) -> str:
    lines = [summary(topology)]
    if len(topology.gpus) <= WIDEST:
        lines += matrix(topology)
    else:
        lines.append(f"(matrix left out: more than {WIDEST} GPUs)")
    return "\n".join([*lines, *assumed(topology)])


def assumed(topology: Graph) -> list[str]:
    """What figures of a machine rest on that its source does not tell, or tells as measured."""
    return [
        told if told.startswith("measured: ") else f"assumed: {told}"
        for told in topology.assumptions
    ]


def summary(topology: Graph) -> str:
    count: Counter[tuple[str, bool]] = Counter()
    for link, back in cables(topology.links):
        count[link.kind, back] += link.count
    parts = [ranks(topology)]
    if topology.forwarders:
        parts.append(f"forwarding over GPU {gpu_list(topology.forwarders)}")
    for (kind, back), links in count.items():
        parts.append(f"{links} {KINDS[kind][links != 1]}{'' if back else ' one way'}")
    return f"{topology.name}: {', '.join(parts)}"


def ranks(topology: Graph) -> str:
    """ "8 GPUs", or "8 CPU ranks"."""
    return counted(len(topology.gpus), "CPU " * topology.on_memory + topology.noun)


def cables(links: Sequence[Link]) -> Iterator[tuple[Link, bool]]:
    """Yield each pair of opposite equal links once, with True; other links with False."""
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
    """A matrix like that of `nvidia-smi topo -m`, with the cells of `Graph.cell`, and its legend.

    A wide matrix is cut into blocks of columns, which are headed by numbers alone.
    """
    names = [f"{topology.noun}{g}" for g in topology.gpus]
    cells = [[topology.cell(a, b) for b in topology.gpus] for a in topology.gpus]
    left = 1 + max(map(len, names))
    short = [str(g) for g in topology.gpus]
    heads = names if left * (1 + len(names)) <= COLUMNS else short
    width = 1 + max(len(cell) for row in (heads, *cells) for cell in row)
    blocks = math.ceil(len(names) / ((COLUMNS - left) // width))
    most = math.ceil(len(names) / blocks)
    lines = []
    for start in range(0, len(names), most):
        for name, row in zip(["", *names], [heads, *cells], strict=True):
            block = "".join(cell.rjust(width) for cell in row[start : start + most])
            lines.append(name.ljust(left) + block)
    used = {re.sub(r"\d+", "#", cell) for row in cells for cell in row}
    legend = "; ".join(f"{cell}: {words}" for cell, words in _CELLS.items() if cell in used)
    return [*lines, *textwrap.wrap(legend, COLUMNS)]


def link_table(topology: Graph) -> list[str]:
    """A line for each cable or, if there are many, for each kind of cable."""
    rows: list[tuple[str, ...]] = []
    every = list(cables(topology.links))
    if len(every) <= LONGEST:
        for link, back in every:
            arrow = "-" if back else "->"
            ends = f"{vertex(link.src)} {arrow} {vertex(link.dst)}"
            rows.append((ends.replace("GPU", topology.noun), *_figures(link)))
    else:
        sorts = Counter((_sort(k.src), _sort(k.dst), back, *_figures(k)) for k, back in every)
        for (a, b, back, *figures), n in sorts.items():
            rows.append((f"{n} of {a} {'-' if back else '->'} {b}", *figures))
    widths = [max(len(row[i]) for row in rows) for i in range(4)] if rows else []
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _figures(link: Link) -> tuple[str, str, str]:
    one = f"{link.bandwidth / 1e9:g} GB/s"
    rate = f"{link.count} x {one} = {link.count * link.bandwidth / 1e9:g} GB/s"
    return (
        KINDS[link.kind][0], rate if link.count > 1 else one,
        f"{link.latency_us:.3g} us{'  speed assumed' * link.assumed}",
    )  # fmt: skip


def inside_node(name: str) -> str:
    """The name of a switch within its node: "nic0" of "node3.nic0"; others as they are."""
    node, _, inner = name.partition(".")
    return inner if inner and node.startswith("node") else name


def vertex(v: Vertex) -> str:
    """ "GPU 3", or the switch's name."""
    return f"GPU {v}" if isinstance(v, int) else v


def _sort(v: Vertex) -> str:
    return "GPU" if isinstance(v, int) else re.sub(r"\d+", "*", v)
