"""NCCL's graphs: the rings and trees that it has chosen, and that it can be given.

NCCL writes them to `NCCL_GRAPH_DUMP_FILE`, and takes them from `NCCL_GRAPH_FILE`. The form is
version 1 of `src/graph/search.cc` in NCCL 2.30. A file is of one node, or of each of several nodes
alike; its GPUs have the numbers of NVML and `nvidia-smi`, whatever CUDA_VISIBLE_DEVICES says.
Inside a node, a tree is a chain in the order of its channel; between nodes NCCL joins the first
GPUs of the chains by trees of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.embed import Embedding
from linkweave.collectives.planning.algorithms.over_trees import over_trees
from linkweave.collectives.planning.algorithms.rings import Ring, over_nics, ring_of
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology, Vertex, speeds
from linkweave.topology.clusters import nodes_of
from linkweave.topology.graph import DIRECT
from linkweave.topology.parts import parts_of
from linkweave.topology.readers.nccl_xml import Element, parse_xml

RING, TREE = 0, 1
KINDS = {RING: "ring", TREE: "tree", 2: "collnet chain", 3: "NVLS", 4: "collnet direct"}
"""What a graph is, by its id."""
_PATTERNS = {RING: 4, TREE: 3}
MOST_CHANNELS = 32  # of a ring or a tree: half of NCCL's, which it doubles itself
CHANNEL = 20.0
"""GB/s of a channel at most: NCCL's own search has no faster ones before it doubles them, and one
channel alone cannot fill more."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The channels of one kind: GPUs in order, and the NICs through which each enters and leaves.

    speed: GB/s of each channel inside the node, as NCCL reckons. path: what its hops run over, as
    `nvidia-smi topo -m` calls it, or NVL. net_speed, net_path: the same to the NICs. cross_nic: 2
    if channels 2c and 2c + 1 are exchanged on every second node, so that data stays on its rail.
    """

    kind: int
    channels: tuple[tuple[int, ...], ...]
    nets: tuple[tuple[int, ...], ...] = ()
    speed: float = 0.0
    path: str = "NVL"
    pattern: int = 4
    net_speed: float = 0.0
    net_path: str = "PIX"
    cross_nic: int = 0

    def algorithm(self, topology: Topology) -> Algorithm:
        """The all-reduce that NCCL does by these channels. Raises PlanError for kinds that are
        neither rings nor chains, and other GPUs than the machine has."""
        if not self.channels:
            raise PlanError(f"the graph has no channels of NCCL's kind {KINDS[self.kind]}")
        if self.kind not in _PATTERNS:
            raise PlanError(f"linkweave has no plans of NCCL's kind {KINDS[self.kind]}")
        size, rank_of = len(topology.gpus), {g: r for r, g in enumerate(topology.gpus)}
        if len(nodes := _nodes(topology)) > 1:
            return ring_of("nccl_ring", size, self._through(nodes, topology))
        for channel in self.channels:
            if sorted(channel) != sorted(topology.gpus):
                raise PlanError(
                    f"the graph is of GPUs {', '.join(map(str, sorted(channel)))}; "
                    f"{topology.name} has {', '.join(map(str, topology.gpus))}"
                )
        found = [tuple(rank_of[g] for g in channel) for channel in self.channels]
        if self.kind == RING:
            return ring_of("nccl_ring", size, found)
        trees = []
        for order in found:
            above = {order[0]: order[0], **{b: a for a, b in pairwise(order)}}
            trees.append(Tree(tuple(above[r] for r in range(size))))
        identity = Embedding(tuple(range(size)))
        return over_trees("nccl_chains", topology, trees, True, identity)

    def _through(self, nodes: Sequence[Sequence[int]], topology: Topology) -> list[Ring]:
        if self.kind != RING:
            raise PlanError(f"between nodes NCCL makes its own of a {KINDS[self.kind]}: no plan")
        local = _local(nodes, topology)
        gpu = [{local[g]: g for g in node} for node in nodes]
        for channel in self.channels:
            if any(sorted(channel) != sorted(known) for known in gpu):
                raise PlanError(
                    f"the graph is of GPUs {', '.join(map(str, sorted(channel)))} of each node; a "
                    f"node of {topology.name} has {', '.join(map(str, sorted(gpu[0])))}"
                )
        paired = self.cross_nic == 2 and len(self.channels) % 2 == 0
        rank_of, found = {g: r for r, g in enumerate(topology.gpus)}, []
        for c in range(len(self.channels)):
            at = [c ^ 1 if paired and i % 2 else c for i in range(len(nodes))]
            parts = [[known[g] for g in self.channels[n]] for known, n in zip(gpu, at, strict=True)]
            told = [self.nets[n] if n < len(self.nets) else () for n in at]
            for nets, taken in zip(told, _nics_of(parts, c, topology), strict=True):
                if nets and tuple(nets) != taken:
                    raise PlanError(
                        f"channel {c} enters a node by NIC {nets[0]} and leaves it by {nets[-1]}; "
                        f"linkweave's paths on {topology.name} do so by {taken[0]} and {taken[1]}"
                    )
            found.append(tuple(rank_of[g] for part in parts for g in part))
        return found


def is_graph(text: str) -> bool:
    return text.lstrip("\ufeff \t\r\n").startswith("<") and "<graphs" in text[:4000]


def read(text: str, where: str = "NCCL graph") -> dict[int, Graph]:
    """The graphs of a file, by kind. Raises TopologyError, with the line, where it is malformed."""
    root = parse_xml(text, where)
    if root.tag != "graphs" or root.attributes.get("version") != "1":
        raise PlanError(f'{where}: line {root.line}: not NCCL\'s <graphs version="1">')
    found: dict[int, Graph] = {}
    for element in root.all("graph"):
        kind = _whole(element, "id", where)
        if kind not in KINDS:
            raise PlanError(f"{where}: line {element.line}: NCCL has no graph of id {kind}")
        channels = [*element.all("channel")]
        found[kind] = Graph(
            kind, tuple(_devices(channel, "gpu", where) for channel in channels),
            tuple(_devices(channel, "net", where) for channel in channels),
            _number(element, "speedintra", where), element.attributes.get("typeintra", ""),
            _whole(element, "pattern", where), _number(element, "speedinter", where),
            element.attributes.get("typeinter", ""), _whole(element, "crossnic", where),
        )  # fmt: skip
    if not any(graph.channels for graph in found.values()):
        raise PlanError(f"{where}: no channels in it")
    return found


def _devices(channel: Element, tag: str, where: str) -> tuple[int, ...]:
    return tuple(_whole(element, "dev", where) for element in channel.all(tag))


def _whole(element: Element, key: str, where: str) -> int:
    """Newer dumps have 0x before a number that is not decimal; NCCL itself has read all as such
    since 2.21."""
    return int(_number(element, key, where, lambda text: int(text, 0)))


def _number(
    element: Element, key: str, where: str, parse: Callable[[str], float] = float
) -> float:  # fmt: skip
    text = element.attributes.get(key, "")
    try:
        found = parse(text)
        if not math.isfinite(found):
            raise ValueError
        return found
    except ValueError:
        raise PlanError(
            f"{where}: line {element.line}: <{element.tag}> needs a number {key}, not {text!r}"
        ) from None


# ---- writing -------------------------------------------------------------------------------------
def of_plan(plan: Plan, topology: Topology) -> tuple[Graph, ...]:
    """A plan's rings or chains as NCCL's. It takes as many channels for rings as for trees, so that
    rings come as chains as well. Raises PlanError for a plan of another kind."""
    if plan.collective != "allreduce":
        raise PlanError(f"NCCL takes the channels of an allreduce, not of a {plan.collective}")
    nodes = _nodes(topology)
    refuse_other_machines("NCCL", topology, "nvlink", several=True)
    if len(nodes) > 1:
        if plan.algorithm != "ring":
            raise PlanError(
                f"NCCL makes its own trees between nodes, and takes rings from us, not "
                f"{plan.algorithm}: take ring"
            )
        return _of_nodes(nodes, topology)
    channels = _chains(plan, topology) if plan.trees else rings_of(plan, topology)
    if plan.detours:
        raise PlanError("NCCL has no detours: a GPU does not forward what is not its own")
    if len(channels) > MOST_CHANNELS:
        raise PlanError(f"NCCL takes at most {MOST_CHANNELS} channels, not {len(channels)}")
    found = []
    for kind in (TREE,) if plan.trees else (RING, TREE):
        hops = [hop for channel in channels for hop in _hops(channel, kind)]
        speed, path = _speed(hops, topology)
        times = _times(speed, len(channels))
        speed, _ = _speed(hops * times, topology)
        found.append(Graph(kind, channels * times, ((),) * len(channels) * times, speed, path,
                           _PATTERNS[kind], speed))  # fmt: skip
    return tuple(found)


def _of_nodes(nodes: Sequence[Sequence[int]], topology: Topology) -> tuple[Graph, ...]:
    """Two rings for each NIC, however many nodes there are: the part that lies in one node, which
    must be alike in all nodes, and its NICs. A chain begins where a ring enters."""
    size, local = len(nodes[0]), _local(nodes, topology)
    rings = [[topology.gpus[r] for r in ring] for ring in over_nics(topology)]
    if not rings:
        raise PlanError(
            f"no rings enter each node of {topology.name} once and leave by its own rails: NCCL's "
            "need equal nodes, and where each GPU has a NIC an even number of them"
        )
    if len(rings) > MOST_CHANNELS:
        raise PlanError(f"NCCL takes at most {MOST_CHANNELS} channels, not {len(rings)}")
    cut = [[ring[k : k + size] for k in range(0, len(ring), size)] for ring in rings]
    ways = [[tuple(local[g] for g in part) for part in parts] for parts in cut]
    nets = [_nics_of(parts, c, topology) for c, parts in enumerate(cut)]
    cross = 2 if any(a != b for of_ring in nets for a, b in of_ring) else 0
    for c, (way, passed) in enumerate(zip(ways, nets, strict=True)):
        for i, here in enumerate(zip(way, passed, strict=True)):
            like = c ^ 1 if cross and i % 2 else c
            if here != (ways[like][0], nets[like][0]):
                raise PlanError(
                    f"NCCL's file is of all nodes alike; node {i} of {topology.name} has other "
                    f"GPUs or NICs in channel {c}"
                )
    hops = [hop for parts in cut for hop in pairwise(parts[0])]
    ends = [(parts[i - 1][-1], part[0]) for parts in cut for i, part in enumerate(parts)]
    inner, path = _speed(hops, topology) if hops else (math.inf, "LOC")
    outer, net_path = _speed(ends, topology)
    times = _times(min(inner, outer), len(rings))
    inner = _speed(hops * times, topology)[0] if hops else inner
    outer, _ = _speed(ends * times, topology)
    # what NCCL finds itself: rings as fast inside as outside, trees at most twice as fast
    speed = {RING: min(inner, outer), TREE: min(inner, 2 * outer)}
    net = min(inner, outer)
    return tuple(
        Graph(kind, tuple(way[0] for way in ways) * times,
              tuple((a, a if kind == TREE else b) for (a, b), *_ in nets) * times, speed[kind],
              path, _PATTERNS[kind], net, net_path, cross if kind == RING else 0)
        for kind in (RING, TREE)
    )  # fmt: skip


def _nodes(topology: Topology) -> list[tuple[int, ...]]:
    """The GPUs of each node, if a network joins several."""
    joined = any(link.kind == "network" for link in topology.fabric)
    return nodes_of(topology) if joined else [topology.gpus]


_NODE = re.compile(r"node(\d+)\.")


def _local(nodes: Sequence[Sequence[int]], topology: Topology) -> dict[int, int]:
    """Each GPU's number in its node, which is that of `nvidia-smi` there.

    `topology.cluster` numbers the GPUs of node i from i times a node's GPUs, and calls its switches
    and NICs node{i}; some of its GPUs and nodes may be left out. Raises PlanError for others.
    """
    at: dict[int, int] = {}
    for link in topology.links:
        if isinstance(link.src, int) and (told := _NODE.match(str(link.dst))):
            at[link.src] = int(told[1])
    first, second = nodes[0][0], nodes[1][0]
    if first in at and second in at and at[first] != at[second]:
        size, rest = divmod(second - first, at[second] - at[first])
        found = {g: g - at[g] * size for node in nodes for g in node if g in at}
        if not rest and len(found) == len(topology.gpus) and all(
            0 <= n < size for n in found.values()
        ):  # fmt: skip
            return found
    raise PlanError(
        f"the numbers of the GPUs of {topology.name} in their nodes are not known: describe it as "
        "'N x MACHINE'"
    )


def _nics_of(parts: Sequence[Sequence[int]], c: int, topology: Topology) -> list[tuple[int, int]]:
    """For each node, the numbers of the NICs by which a channel enters and leaves it."""
    out: list[int] = []
    into: list[int] = []
    for part, following in zip(parts, [*parts[1:], parts[0]], strict=True):
        if (path := topology.hops.get((part[-1], following[0]))) is None:
            raise PlanError(
                f"channel {c} goes from GPU {part[-1]} to {following[0]} of {topology.name}, "
                "between which there is no path: their rails do not meet"
            )
        inside = [str(v) for v in path if _NODE.match(str(v))]
        node = {_NODE.match(v)[0] for v in inside}  # type: ignore[index]
        if len(node) != 2:
            raise PlanError(f"the NICs of {topology.name} are not known: write 'N x MACHINE'")
        home = _NODE.match(inside[0])[0]  # type: ignore[index]
        out.append(_number_of([v for v in inside if v.startswith(home)][-1], topology))
        into.append(_number_of(next(v for v in inside if not v.startswith(home)), topology))
    return list(zip([into[-1], *into[:-1]], out, strict=True))


def _number_of(nic: str, topology: Topology) -> int:
    """A NIC's place among its node's, in the order of their names."""
    node = _NODE.match(nic)[0]  # type: ignore[index]
    outside = {
        str(link.src) for link in topology.links if link.kind == "network"
        and str(link.src).startswith(node) and not str(link.dst).startswith(node)
    }  # fmt: skip
    return sorted(outside, key=_natural).index(nic)


def _natural(name: str) -> tuple[str, int]:
    text = name.rstrip("0123456789")
    return text, int(name[len(text) :] or 0)


def _times(speed: float, channels: int) -> int:
    """How often each channel comes, so that none needs more than a channel can carry."""
    return min(max(1, math.ceil(speed / CHANNEL - 0.01)), MOST_CHANNELS // channels)


def refuse_other_machines(
    engine: str, topology: Topology, kind: str, several: bool = False
) -> None:
    """Raise PlanError unless this is one node of GPUs of the engine's vendor, or `several`."""
    kinds = {link.kind for link in topology.fabric}
    if len(topology.gpus) < 2:
        raise PlanError(f"{engine} takes graphs of two GPUs and more")
    if "network" in kinds and not several:
        raise PlanError(f"{engine} takes graphs of one node, not of {topology.name}")
    if "memory" in kinds or kinds & set(DIRECT) - {kind}:
        raise PlanError(f"{engine} does not run on {topology.name}")


def rings_of(plan: Plan, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """A plan's rings, as GPUs in order. Raises PlanError if it has none."""
    parts = parts_of(plan, topology)
    if not all(part.name.startswith("ring ") for part in parts):
        raise PlanError(
            f"NCCL takes rings and trees; {plan.algorithm} has neither: take ring or chain"
        )
    return tuple(_ordered({a[0]: a[-1] for a in part.arrows}) for part in parts)


def _ordered(after: Mapping[int, int]) -> tuple[int, ...]:
    order = [min(after)]
    while (following := after[order[-1]]) != order[0]:
        order.append(following)
    return tuple(order)


def _chains(plan: Plan, topology: Topology) -> tuple[tuple[int, ...], ...]:
    found = []
    for tree in plan.trees:
        order, below = [tree.root], tree.children(tree.root)
        while len(below) == 1:
            order.append(below[0])
            below = tree.children(below[0])
        if below:
            raise PlanError(
                f"{plan.algorithm} has trees that branch, of which NCCL makes chains inside a "
                "node: take ring or chain"
            )
        found.append(tuple(topology.gpus[r] for r in order))
    return tuple(found)


def _hops(channel: Sequence[int], kind: int) -> Iterable[tuple[int, int]]:
    ends = (channel[-1], channel[0])
    return [*pairwise(channel), ends] if kind == RING else pairwise(channel)


def _speed(hops: Sequence[tuple[int, int]], topology: Topology) -> tuple[float, str]:
    """GB/s of a hop that shares links with the others, and the longest kind of path; between nodes
    that to a NIC."""
    uses: Counter[tuple[Vertex, Vertex]] = Counter()
    for a, b in hops:
        for ends in pairwise(topology.hops[a, b]):
            uses[ends] += 1
    rates, kinds = [], set()
    for ends, times in uses.items():
        link = topology.by_ends[ends]
        nvlink = link.kind == "nvlink"
        payload = speeds.payload(speeds.generation(link.bandwidth)) if nvlink else 1.0
        rates.append(link.bandwidth * link.count * payload / times / 1e9)
        kinds.add(link.kind)
    longest = max(len(topology.hops[hop]) for hop in hops)
    if "network" in kinds:
        longest = (longest - 1) // 2
    if kinds == {"nvlink"}:
        path = "NVL"
    elif "socket" in kinds:
        path = "SYS"
    elif "host" in kinds:
        path = "PHB"
    else:
        path = "PIX" if longest <= 3 else "PXB"
    slowest = min(rates)
    steps = 10 if slowest >= 1 else 1000  # of what is written
    return math.floor(slowest * steps + 1e-6) / steps, path


def write(graphs: Iterable[Graph]) -> str:
    lines = ['<graphs version="1">']
    for graph in graphs:
        lines.append(
            f'  <graph id="{graph.kind}" pattern="{graph.pattern}" crossnic="{graph.cross_nic}" '
            f'nchannels="{len(graph.channels)}" speedintra="{graph.speed:g}" '
            f'speedinter="{graph.net_speed:g}" latencyinter="0" typeintra="{graph.path}" '
            f'typeinter="{graph.net_path}" samechannels="0">'
        )
        for channel, nets in zip(graph.channels, graph.nets, strict=True):
            # newer readers take 16 for the base, older ones what the text begins with
            ends = [f'      <net dev="{dev:#x}"/>' for dev in nets]
            gpus = [f'      <gpu dev="{dev:#x}"/>' for dev in channel]
            lines += ["    <channel>", *ends[:1], *gpus, *ends[1:], "    </channel>"]
        lines.append("  </graph>")
    return "\n".join([*lines, "</graphs>"]) + "\n"
