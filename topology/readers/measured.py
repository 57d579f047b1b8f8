"""Measured figures that replace a machine's nominal ones.

Figures of links come from `linkweave bench links` or from NVIDIA's p2pBandwidthLatencyTest (one-way
bandwidth and latency with peer access). Both measure one pair of GPUs at a time. A link that
several pairs share gets the highest bandwidth and the lowest latency that any of them measured; it
may carry more when several pairs use it at once, so bounds from such figures are only estimates.
Times of whole all-reduces (`topology.timings`) are kept beside the links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from linkweave.topology.checks import TopologyError, integer, number, read_format, records
from linkweave.topology.graph import DIRECT, FASTEST, KINDS, LARGEST, GpuId, Link, Vertex
from linkweave.topology.timings import (
    looks_like_collectives,
    looks_like_timings,
    parse_collectives,
    parse_timings,
)
from linkweave.topology.topology import Topology

FORMAT = "linkweave-links"
_ABOVE = 1.1  # times its nominal speed, a link is not measured
_P2P_BANDWIDTH = re.compile(r"Unidirectional P2P=Enabled Bandwidth[^\n]{0,40}Matrix \(GB/s\)")
_P2P_LATENCY = re.compile(r"P2P=Enabled Latency[^\n]{0,40}Matrix \(us\)")


@dataclass(frozen=True, slots=True)
class PairFigure:
    """One GPU (or CPU rank) to another: bytes/s while others idle, us of a small message."""

    src: int
    dst: int
    bandwidth: float
    latency_us: float | None = None

    def __post_init__(self) -> None:
        for name in ("src", "dst"):
            value = integer(getattr(self, name), name, 0, LARGEST, TopologyError)
            object.__setattr__(self, name, value)
        if self.src == self.dst:
            raise TopologyError(f"src and dst are both {self.src}")
        where = f"{self.src} to {self.dst}"
        number(self.bandwidth, f"{where}: bandwidth", 1e-6, FASTEST, TopologyError)
        if self.latency_us is not None:
            number(self.latency_us, f"{where}: latency_us", 1e-6, 1e9, TopologyError)


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Measurements between pairs of GPUs or CPU ranks.

    `pairs` use the numbers in `devices`, or CUDA's order without devices. `together` is the rate of
    all ranks at once in bytes/s if they share one memory, else None. `machine` names the machine.
    """

    pairs: tuple[PairFigure, ...]
    devices: tuple[GpuId, ...] = ()
    together: float | None = None
    machine: str = ""

    def to_json(self) -> str:
        """JSON that `topology.load(..., measured=...)` reads."""
        return json.dumps({"format": FORMAT, "version": 1, **asdict(self)}, indent=1)


def looks_like_p2p(text: str) -> bool:
    return bool(_P2P_BANDWIDTH.search(text))


def overlay(topology: Topology, text: str, where: str) -> Topology:
    """Return the machine with measured figures; GPUs are matched by UUID or bus id if known.

    Raises TopologyError for another kind of text, GPUs that the machine lacks, figures that are not
    positive numbers, and figures of another machine: CPU ranks for GPUs, or a rate that a link
    cannot reach.
    """
    if looks_like_timings(text):
        return replace(topology, timings=parse_timings(text, topology.name, where))
    if looks_like_collectives(text):
        kind = "cpu" if topology.on_memory else "cuda"
        found = parse_collectives(text, topology.name, len(topology.gpus), kind, where)
        return replace(topology, timings=found)
    if looks_like_p2p(text):
        figures = _parse_p2p(text, where)
    elif text.lstrip("\ufeff \t\r\n").startswith("{"):
        figures = _parse_json(text, where)
    else:
        raise TopologyError(
            f"{where}: neither the JSON of linkweave bench links, algorithms or collectives nor "
            "what p2pBandwidthLatencyTest or, on the command line, nccl-tests print"
        )
    if figures.machine and figures.machine.startswith("cpu-") != topology.on_memory:
        raise TopologyError(
            f"{where}: figures of {figures.machine}, which are not of {topology.name}'s kind"
        )
    own, note = _matched(topology, figures, where)
    best: dict[tuple[Vertex, Vertex], float] = {}
    least: dict[tuple[Vertex, Vertex], float] = {}
    for pair in figures.pairs:
        src, dst = own[pair.src], own[pair.dst]
        if src not in topology.gpus or dst not in topology.gpus:
            continue  # of a larger machine than this subset
        if (src, dst) not in topology.ways:
            raise TopologyError(
                f"{where}: has a figure for GPU {src} to GPU {dst}, which nothing joins in "
                f"{topology.name}"
            )
        for ends in pairwise(topology.ways[src, dst]):
            best[ends] = max(best.get(ends, 0.0), pair.bandwidth)
            if pair.latency_us is not None:
                least[ends] = min(least.get(ends, pair.latency_us), pair.latency_us)
    bus = ("store", "load")
    same_size = figures.machine in ("", f"cpu-{len(topology.gpus)}")
    if figures.together and bus in best and same_size:
        best[bus] = figures.together

    def measured(link: Link) -> Link:
        ends = (link.src, link.dst)
        if ends not in best:
            return link
        each = max(1, round(best[ends] / link.count))
        if link.kind in DIRECT and each > _ABOVE * link.bandwidth:
            raise TopologyError(
                f"{where}: {best[ends] / 1e9:.4g} GB/s from {link.src} to {link.dst}, whose "
                f"{link.count} {KINDS[link.kind][1]} carry {link.count * link.bandwidth / 1e9:g}: "
                "figures of "
                "another machine, or of GPUs numbered otherwise?"
            )
        latency_us = least.get(ends, link.latency_us)
        return replace(link, bandwidth=each, latency_us=latency_us, assumed=False)

    links = tuple(map(measured, topology.links))
    rest = sum((k.src, k.dst) not in best for k in topology.fabric)
    notes = [f"measured: {where}{note}"]
    kept = topology.assumptions
    if rest:
        notes.append(f"{rest} of {len(topology.fabric)} links were not measured: nominal figures")
    else:  # what was nominal is no longer assumed
        kept = tuple(told for told in kept if "not measured" not in told)
    return replace(topology, links=links, assumptions=(*kept, *notes))


def _matched(
    topology: Topology, figures: LinkFigures, where: str
) -> tuple[Mapping[int, int | None], str]:
    """The machine's number of each measured GPU, and a note on how GPUs were matched.

    The number is None for a GPU that the machine lacks, which is fine if all its own GPUs were
    measured: figures of a whole machine serve a subset.
    """
    used = sorted({g for pair in figures.pairs for g in (pair.src, pair.dst)})
    told = {d.gpu: d for d in figures.devices if d.uuid or d.bus_id}
    known = [d for d in topology.devices if d.uuid or d.bus_id]
    everyone = (*topology.gpus, *topology.forwarders)
    own: dict[int, int | None] = {}
    for g in used:
        if g in told and known:
            same = (d.gpu for d in known if (d.uuid and d.uuid == told[g].uuid)
                    or (d.bus_id and d.bus_id == told[g].bus_id))  # fmt: skip
            own[g] = next(same, None)
        else:
            own[g] = g if g in everyone else None
    lost = [g for g in used if own[g] is None]
    if lost and not set(topology.gpus) <= set(own.values()):
        name = (told[lost[0]].uuid or told[lost[0]].bus_id) if lost[0] in told else str(lost[0])
        has = [d.uuid or d.bus_id for d in known] if lost[0] in told and known else everyone
        raise TopologyError(
            f"{where}: has figures for GPU {name}, which is not in {topology.name}; it has "
            + ", ".join(map(str, has))
        )
    by_identity = bool(known) and all(g in told for g in used)
    return own, "" if by_identity or topology.on_memory else ", GPUs matched by their numbers"


def _parse_json(text: str, where: str) -> LinkFigures:
    data = read_format(text, FORMAT, where)
    pairs = records(PairFigure, data.get("pairs"), f"{where}: pairs")
    if not pairs:
        raise TopologyError(f'{where}: "pairs" is empty')
    ends = [(pair.src, pair.dst) for pair in pairs]
    if len(set(ends)) < len(ends):
        twice = next(e for e in ends if ends.count(e) > 1)
        raise TopologyError(f"{where}: two figures for {twice[0]} to {twice[1]}")
    machine = data.get("machine", "")
    if not isinstance(machine, str):
        raise TopologyError(f'{where}: "machine" must be text')
    together = data.get("together")
    if together is not None:
        number(together, f"{where}: together", 1e-6, FASTEST, TopologyError)
    devices = records(GpuId, data.get("devices", []), f"{where}: devices")
    return LinkFigures(pairs, devices, together, machine)


def _parse_p2p(text: str, where: str) -> LinkFigures:
    lines = text.splitlines()
    bandwidth = dict(_matrix(lines, _P2P_BANDWIDTH, where))
    latency = dict(_matrix(lines, _P2P_LATENCY, where))
    pairs = [
        {"src": a, "dst": b, "bandwidth": gbs * 1e9, "latency_us": latency.get((a, b))}
        for (a, b), gbs in bandwidth.items() if a != b
    ]  # fmt: skip
    return LinkFigures(records(PairFigure, pairs, where))


def _matrix(
    lines: list[str], title: re.Pattern[str], where: str
) -> Iterator[tuple[tuple[int, int], float]]:
    at = next((i for i, line in enumerate(lines) if title.search(line)), None)
    if at is None:
        return
    columns = (
        [int(c) for c in re.findall(r"\b\d{1,6}\b", lines[at + 1])] if at + 1 < len(lines) else []
    )
    for offset, row in enumerate(columns):
        i = at + 2 + offset
        words = lines[i].split() if i < len(lines) else []
        numeric = all(re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", word) for word in words)
        if len(words) != len(columns) + 1 or not numeric or words[0] != str(row):
            raise TopologyError(
                f"{where}: line {i + 1}: expected the row of GPU {row} with {len(columns)} "
                "figures: was the text cut short?"
            )
        yield from (((row, c), float(w)) for c, w in zip(columns, words[1:], strict=True))
