"""Measured figures, laid over a machine's nominal ones.

Times of whole collectives are kept beside the links (`topology.timings`). Figures of links have two
sources: what `linkweave bench links` writes, and what NVIDIA's p2pBandwidthLatencyTest prints
(its one-way bandwidth and latency with peer access). Both measure pairs of GPUs, one at a time, so
a link that several pairs share is given the most that any of them moved over it, and the least
latency. It may carry more when several pairs use it at once: a bound on such figures is only as
true as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from linkweave.topology.errors import TopologyError
from linkweave.topology.link import Device, Link
from linkweave.topology.routes import Vertex
from linkweave.topology.timings import looks_like_timings, parse_timings
from linkweave.topology.topology import Topology

FORMAT = "linkweave-links"
_ABOVE = 1.1  # times its nominal speed, a link is not measured
_P2P_BANDWIDTH = re.compile(r"Unidirectional P2P=Enabled Bandwidth[^\n]{0,40}Matrix \(GB/s\)")
_P2P_LATENCY = re.compile(r"P2P=Enabled Latency[^\n]{0,40}Matrix \(us\)")


@dataclass(frozen=True, slots=True)
class PairFigure:
    """What one GPU (or CPU rank) moves to another: bytes/s alone, and us for a small message."""

    src: int
    dst: int
    bandwidth: float
    latency_us: float | None = None


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What was measured between pairs, and on what.

    `pairs` name GPUs by their number in `devices` (or, without devices, in CUDA's order);
    `together` is the bytes/s of all ranks at once where they share one memory, else None.
    """

    pairs: tuple[PairFigure, ...]
    devices: tuple[Device, ...] = ()
    together: float | None = None
    machine: str = ""

    def to_json(self) -> str:
        """Stable JSON that `topology.load(..., measured=...)` reads."""
        return json.dumps({"format": FORMAT, "version": 1, **asdict(self)}, indent=1)


def looks_like_p2p(text: str) -> bool:
    """Whether this is p2pBandwidthLatencyTest's output."""
    return bool(_P2P_BANDWIDTH.search(text))


def overlay(topology: Topology, text: str, where: str) -> Topology:
    """The same machine with measured figures. GPUs are matched by UUID or bus id where both know.

    Raises TopologyError for a text of another kind, GPUs that the machine has not, figures that are
    no positive numbers, and figures of another machine: of CPU ranks for GPUs, or beyond what a
    link can carry.
    """
    if looks_like_timings(text):
        return replace(topology, timings=parse_timings(text, topology.name, where))
    if looks_like_p2p(text):
        figures = _parse_p2p(text, where)
    elif text.lstrip("\ufeff \t\r\n").startswith("{"):
        figures = _parse_json(text, where)
    else:
        raise TopologyError(
            f"{where}: neither the JSON of linkweave bench links or algorithms nor what "
            "p2pBandwidthLatencyTest prints"
        )
    if figures.machine and figures.machine.startswith("cpu-") != topology.on_memory:
        raise TopologyError(
            f"{where}: figures of {figures.machine}, which are not of {topology.name}'s kind"
        )
    number, note = _matched(topology, figures, where)
    best: dict[tuple[Vertex, Vertex], float] = {}
    least: dict[tuple[Vertex, Vertex], float] = {}
    for pair in figures.pairs:
        src, dst = number[pair.src], number[pair.dst]
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
        if link.kind == "nvlink" and each > _ABOVE * link.bandwidth:
            raise TopologyError(
                f"{where}: {best[ends] / 1e9:.4g} GB/s from {link.src} to {link.dst}, whose "
                f"{link.count} NVLinks carry {link.count * link.bandwidth / 1e9:g}: figures of "
                "another machine, or of GPUs numbered otherwise?"
            )
        return replace(link, bandwidth=each, latency_us=least.get(ends, link.latency_us))

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
    """The machine's number of each measured GPU, and a word on how it was found.

    None for a GPU that the machine has not, as long as all that it has were measured: figures of a
    whole machine serve a subset.
    """
    used = sorted({g for pair in figures.pairs for g in (pair.src, pair.dst)})
    told = {d.gpu: d for d in figures.devices if d.uuid or d.bus_id}
    known = [d for d in topology.devices if d.uuid or d.bus_id]
    everyone = (*topology.gpus, *topology.forwarders)
    number: dict[int, int | None] = {}
    for g in used:
        if g in told and known:
            same = (d.gpu for d in known if (d.uuid and d.uuid == told[g].uuid)
                    or (d.bus_id and d.bus_id == told[g].bus_id))  # fmt: skip
            number[g] = next(same, None)
        else:
            number[g] = g if g in everyone else None
    lost = [g for g in used if number[g] is None]
    if lost and not set(topology.gpus) <= set(number.values()):
        name = (told[lost[0]].uuid or told[lost[0]].bus_id) if lost[0] in told else str(lost[0])
        has = [d.uuid or d.bus_id for d in known] if lost[0] in told and known else everyone
        raise TopologyError(
            f"{where}: has figures for GPU {name}, which is not in {topology.name}; it has "
            + ", ".join(map(str, has))
        )
    by_identity = bool(known) and all(g in told for g in used)
    return number, "" if by_identity or topology.on_memory else ", GPUs matched by their numbers"


def _figure(src: object, dst: object, bandwidth: object, latency: object, at: str) -> PairFigure:
    for name, gpu in (("src", src), ("dst", dst)):
        if isinstance(gpu, bool) or not isinstance(gpu, int) or not 0 <= gpu < 1e9:
            raise TopologyError(f"{at}: {name} must be a GPU's number, not {gpu!r}")
    if src == dst:
        raise TopologyError(f"{at}: src and dst are both {src}")
    for name, value, may_lack in (("bandwidth", bandwidth, False), ("latency_us", latency, True)):
        if value is None and may_lack:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= 1e18:  # type: ignore[operator]
            raise TopologyError(f"{at}: {name} must be a positive number, not {value!r:.80}")
    return PairFigure(src, dst, bandwidth, latency)  # type: ignore[arg-type]


def _parse_json(text: str, where: str) -> LinkFigures:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{where}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != 1:
        raise TopologyError(f'{where}: needs "format": "{FORMAT}" and "version": 1 at the top')
    listed, devices = data.get("pairs"), data.get("devices", [])
    if not isinstance(listed, list) or not isinstance(devices, list):
        raise TopologyError(f'{where}: "pairs" and "devices" must be lists')
    pairs = []
    for i, entry in enumerate(listed):
        at = f"{where}: pairs[{i}]"
        if not isinstance(entry, dict):
            raise TopologyError(f"{at} must be an object, not {entry!r}")
        pairs.append(_figure(entry.get("src"), entry.get("dst"), entry.get("bandwidth"),
                             entry.get("latency_us"), at))  # fmt: skip
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
        together = _figure(0, 1, together, None, f"{where}: together").bandwidth
    try:
        return LinkFigures(tuple(pairs), tuple(Device(**d) for d in devices), together, machine)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None
    except TypeError:
        raise TopologyError(
            f'{where}: each of "devices" must have "gpu" and may have "bus_id", "uuid", "model" '
            'and "sm"'
        ) from None


def _parse_p2p(text: str, where: str) -> LinkFigures:
    lines = text.splitlines()
    bandwidth = dict(_matrix(lines, _P2P_BANDWIDTH, where))
    latency = dict(_matrix(lines, _P2P_LATENCY, where))
    pairs = [
        _figure(a, b, gbs * 1e9, latency.get((a, b)), f"{where}: {a} to {b}")
        for (a, b), gbs in bandwidth.items()
        if a != b
    ]
    return LinkFigures(tuple(pairs))


def _matrix(
    lines: list[str], title: re.Pattern[str], where: str
) -> Iterator[tuple[tuple[int, int], float]]:
    """The cells of the matrix under a title."""
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
