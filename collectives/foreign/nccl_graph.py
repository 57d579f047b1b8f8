"""NCCL's graphs: the rings and trees that it has chosen, and that it can be given.

NCCL writes them to `NCCL_GRAPH_DUMP_FILE`, and takes them from `NCCL_GRAPH_FILE`. The form is
version 1 of `src/graph/search.cc` in NCCL 2.30. A file is of one node, or of each of several nodes
alike; its GPUs have the numbers of NVML and `nvidia-smi`, whatever CUDA_VISIBLE_DEVICES says.
Inside a node, a tree is a chain in the order of its channel; between nodes NCCL joins the first
GPUs of the chains by trees of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.embed import Embedding
from linkweave.collectives.planning.algorithms.over_trees import over_trees
from linkweave.collectives.planning.algorithms.rings import Ring, ring_of
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology, Vertex, speeds
from linkweave.topology.clusters import nodes_of
from linkweave.topology.link import DIRECT
from linkweave.topology.nccl_xml import Element, parse_xml
from linkweave.topology.parts import parts_of

RING, TREE = 0, 1
KINDS = {RING: "ring", TREE: "tree", 2: "collnet chain", 3: "NVLS", 4: "collnet direct"}
"""What a graph is, by its id."""
_PATTERNS = {RING: 4, TREE: 3}
MOST_CHANNELS = 32
"""Of a ring or a tree: half of NCCL's, which it doubles itself."""
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
        """The rings through all nodes, as ranks."""
        if self.kind != RING:
            raise PlanError(f"between nodes NCCL makes its own of a {KINDS[self.kind]}: no plan")
        local = list(range(len(nodes[0])))
        if any(
            len(node) != len(local) or sorted(c) != local for node in nodes for c in self.channels
        ):
            raise PlanError(
                f"the graph is of GPUs {', '.join(map(str, sorted(self.channels[0])))} of each "
                f"node; {topology.name} has nodes of {sorted({len(node) for node in nodes})}"
            )
        paired = self.cross_nic == 2 and len(self.channels) % 2 == 0
        rank_of, found = {g: r for r, g in enumerate(topology.gpus)}, []
        for c in range(len(self.channels)):
            ring: list[int] = []
            nets = []
            for i, node in enumerate(nodes):
                at = c ^ 1 if paired and i % 2 else c
                ring += [node[g] for g in self.channels[at]]
                nets.append(self.nets[at] if at < len(self.nets) else ())
            _check_nets(c, ring, nets, nodes, topology)
            found.append(tuple(rank_of[g] for g in ring))
        return found


def _check_nets(
    c: int, ring: Sequence[int], nets: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]],
    topology: Topology,
) -> None:  # fmt: skip
    """Raise PlanError if our paths between nodes take other NICs than the file's."""
    size = len(nodes[0])
    for i, told in enumerate(nets):
        last, first = ring[(i + 1) * size - 1], ring[(i + 1) * size % len(ring)]
        following = nets[(i + 1) % len(nets)]
        for side, (wanted, taken) in enumerate(
            zip((told[-1:], following[:1]), _nics(last, first, topology), strict=True)
        ):
            if wanted and wanted[0] != taken:
                raise PlanError(
                    f"channel {c} {'enters' if side else 'leaves'} a node by NIC {wanted[0]}; from "
                    f"GPU {last} to {first} of {topology.name} linkweave knows the path by NIC "
                    f"{taken} only"
                )


def is_graph(text: str) -> bool:
    """Whether a text looks like a file of graphs."""
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
    if plan.trees and len(nodes) > 1:
        raise PlanError("NCCL makes its own trees between nodes: take ring")
    channels = _chains(plan, topology) if plan.trees else rings_of(plan, topology)
    if plan.detours:
        raise PlanError("NCCL has no detours: a GPU does not forward what is not its own")
    if len(nodes) > 1:
        return _of_nodes(channels, nodes, topology)
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


def _of_nodes(
    rings: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], topology: Topology
) -> tuple[Graph, ...]:
    """The part of each ring that lies in one node, which must be alike in all nodes, and its NICs.
    A chain begins where the ring enters."""
    size = len(nodes[0])
    spot = {g: (i, position) for i, node in enumerate(nodes) for position, g in enumerate(node)}
    ways, nets, crossing = [], [], []
    for ring in rings:
        start = next(k for k, g in enumerate(ring) if spot[g][0] == 0 != spot[ring[k - 1]][0])
        order = [*ring[start:], *ring[:start]]
        parts = [order[k : k + size] for k in range(0, len(order), size)]
        if any({spot[g][0] for g in part} != {i} for i, part in enumerate(parts)):
            raise PlanError("NCCL's rings enter each node once, this plan's do not")
        ends = [(parts[i - 1][-1], part[0]) for i, part in enumerate(parts)]
        crossing += ends
        nets.append((_nics(*ends[0], topology)[1], _nics(*ends[1], topology)[0]))
        ways.append([tuple(spot[g][1] for g in part) for part in parts])
    cross = 2 if any(a != b for a, b in nets) else 0
    for c, way in enumerate(ways):
        other = ways[c ^ 1][0] if cross and c ^ 1 < len(ways) else way[0]
        if any(path != (other if i % 2 else way[0]) for i, path in enumerate(way)):
            raise PlanError(f"NCCL's file is of all nodes alike; ring {c} of the plan differs")
    inside = [tuple(nodes[0][g] for g in way[0]) for way in ways]
    hops = [hop for path in inside for hop in pairwise(path)]
    speed, path = _speed(hops, topology) if hops else (CHANNEL, "LOC")
    net_speed, net_path = _speed(crossing, topology)
    times = _times(min(speed, net_speed), len(ways))
    speed = _speed(hops * times, topology)[0] if hops else speed
    net_speed, _ = _speed(crossing * times, topology)
    channels = tuple(way[0] for way in ways) * times
    return tuple(
        Graph(kind, channels, tuple((a, a if kind == TREE else b) for a, b in nets) * times, speed,
              path, _PATTERNS[kind], net_speed, net_path, cross if kind == RING else 0)
        for kind in (RING, TREE)
    )  # fmt: skip


def _nodes(topology: Topology) -> list[tuple[int, ...]]:
    """The GPUs of each node, if a network joins several."""
    joined = any(link.kind == "network" for link in topology.fabric)
    return nodes_of(topology) if joined else [topology.gpus]


def _nics(a: int, b: int, topology: Topology) -> tuple[int, int]:
    """The numbers of the NICs between two GPUs of different nodes, each in its node's order of
    names."""
    path = topology.hops[a, b]
    steps = [k for k, ends in enumerate(pairwise(path)) if topology.by_ends[ends].kind == "network"]
    found = []
    for nic in (path[steps[0]], path[steps[-1] + 1]):
        node = str(nic).partition(".")[0] + "."
        names = {
            str(link.src) for link in topology.links
            if link.kind == "network" and str(link.src).startswith(node)
        }  # fmt: skip
        found.append(sorted(names, key=_natural).index(str(nic)))
    return found[0], found[1]


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
    return int(min(rates) * 10 + 1e-6) / 10, path


def write(graphs: Iterable[Graph]) -> str:
    """The text for `NCCL_GRAPH_FILE`."""
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
