"""NCCL's graphs: the rings and trees that it has chosen, and that it can be given.

NCCL writes them to `NCCL_GRAPH_DUMP_FILE`, and takes them from `NCCL_GRAPH_FILE`. The form is
version 1 of `src/graph/search.cc` in NCCL 2.30. A file is of one node; its GPUs have the numbers of
NVML and `nvidia-smi`, whatever CUDA_VISIBLE_DEVICES says. Inside a node, a tree is a chain in the
order of its channel.
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
from linkweave.collectives.planning.algorithms.rings import ring_of
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology, Vertex, speeds
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
    `nvidia-smi topo -m` calls it, or NVL.
    """

    kind: int
    channels: tuple[tuple[int, ...], ...]
    nets: tuple[tuple[int, ...], ...] = ()
    speed: float = 0.0
    path: str = "NVL"
    pattern: int = 4

    def algorithm(self, topology: Topology) -> Algorithm:
        """The all-reduce that NCCL does by these channels. Raises PlanError for kinds that are
        neither rings nor chains, and other GPUs than the machine has."""
        if not self.channels:
            raise PlanError(f"the graph has no channels of NCCL's kind {KINDS[self.kind]}")
        if self.kind not in _PATTERNS:
            raise PlanError(f"linkweave has no plans of NCCL's kind {KINDS[self.kind]}")
        size, rank_of = len(topology.gpus), {g: r for r, g in enumerate(topology.gpus)}
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
            _whole(element, "pattern", where),
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
    refuse_other_machines("NCCL", topology, "nvlink")
    channels = _chains(plan, topology) if plan.trees else rings_of(plan, topology)
    if plan.detours:
        raise PlanError("NCCL has no detours: a GPU does not forward what is not its own")
    if len(channels) > MOST_CHANNELS:
        raise PlanError(f"NCCL takes at most {MOST_CHANNELS} channels, not {len(channels)}")
    found = []
    for kind in (TREE,) if plan.trees else (RING, TREE):
        speed, path = _speed(channels, kind, topology)
        times = min(max(1, math.ceil(speed / CHANNEL - 0.01)), MOST_CHANNELS // len(channels))
        every = channels * times
        speed, _ = _speed(every, kind, topology)
        found.append(Graph(kind, every, (), speed, path, _PATTERNS[kind]))
    return tuple(found)


def refuse_other_machines(engine: str, topology: Topology, kind: str) -> None:
    """Raise PlanError unless this is one node of GPUs of the engine's vendor."""
    kinds = {link.kind for link in topology.fabric}
    if len(topology.gpus) < 2:
        raise PlanError(f"{engine} takes graphs of two GPUs and more")
    if "network" in kinds:
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


def _speed(channels: Sequence[Sequence[int]], kind: int, topology: Topology) -> tuple[float, str]:
    """GB/s of a channel that shares links with the others, and the longest kind of path."""
    hops = [hop for channel in channels for hop in _hops(channel, kind)]
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
            f'  <graph id="{graph.kind}" pattern="{graph.pattern}" crossnic="0" '
            f'nchannels="{len(graph.channels)}" speedintra="{graph.speed:g}" '
            f'speedinter="{graph.speed:g}" latencyinter="0" typeintra="{graph.path}" '
            'typeinter="PIX" samechannels="0">'
        )
        for channel in graph.channels:
            # newer readers take 16 for the base, older ones what the text begins with
            gpus = [f'      <gpu dev="{dev:#x}"/>' for dev in channel]
            lines += ["    <channel>", *gpus, "    </channel>"]
        lines.append("  </graph>")
    return "\n".join([*lines, "</graphs>"]) + "\n"
