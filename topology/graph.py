"""What is wired: directed links between GPUs and switches, as one immutable value."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from topology.errors import TopologyError

Vertex = int | str
"""A GPU (or CPU rank) is an int; what only passes traffic on (a switch, a bus) is a str."""

KINDS = {"nvlink": "NV", "pcie": "PCI", "memory": "MEM", "network": "NET"}
"""Kinds of link, and how the matrix abbreviates them."""

_FORMAT = "linkweave-topology"


@dataclass(frozen=True, slots=True)
class Link:
    """`count` equal physical links side by side, in one direction.

    `bandwidth` is bytes/s of *one* of them; `latency_us` is what a chunk step pays over them
    beside its bytes (the alpha of the cost model). Kind is one of `KINDS`.
    """

    src: Vertex
    dst: Vertex
    bandwidth: int
    count: int = 1
    latency_us: float = 5.0
    kind: str = "nvlink"

    def __post_init__(self) -> None:
        where = f"link {self.src}->{self.dst}"
        for name, end in (("src", self.src), ("dst", self.dst)):
            if isinstance(end, bool) or not isinstance(end, int | str):
                raise TopologyError(f"{where}: {name} must be a GPU number or a switch name")
        if self.src == self.dst:
            raise TopologyError(f"{where} joins a vertex to itself")
        for name, value, integer in (
            ("bandwidth", self.bandwidth, True),
            ("count", self.count, True),
            ("latency_us", self.latency_us, False),
        ):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or (integer and not isinstance(value, int)):
                raise TopologyError(f"{where}: {name} must be a number, not {value!r}")
        if self.bandwidth <= 0 or self.count <= 0 or not 0 <= self.latency_us < float("inf"):
            raise TopologyError(
                f"{where}: bandwidth {self.bandwidth} and count {self.count} must be positive, "
                f"latency_us {self.latency_us} finite and not negative"
            )
        if self.kind not in KINDS:
            raise TopologyError(
                f"{where}: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
            )


@dataclass(frozen=True, eq=True)
class Topology:
    """A machine: GPUs, switches between them, directed links.

    Rank r of a plan is `gpus[r]`; a subset keeps its GPUs' numbers. What a reader had to assume
    stands in `assumptions`. Raises TopologyError where it contradicts itself.
    """

    name: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.gpus:
            raise TopologyError(f"{self.name}: a topology needs at least one GPU")
        if any(isinstance(g, bool) or not isinstance(g, int) or g < 0 for g in self.gpus):
            raise TopologyError(f"{self.name}: GPU numbers must be integers >= 0, not {self.gpus}")
        if len(set(self.gpus)) != len(self.gpus):
            raise TopologyError(f"{self.name}: a GPU is listed twice in {self.gpus}")
        known, seen = set(self.gpus), set()
        for link in self.links:
            for end in (link.src, link.dst):
                if isinstance(end, int) and end not in known:
                    raise TopologyError(
                        f"{self.name}: link {link.src}->{link.dst} names GPU {end}, "
                        f"which is not among {list(self.gpus)}"
                    )
            if (link.src, link.dst) in seen:
                raise TopologyError(
                    f"{self.name}: two entries for link {link.src}->{link.dst}; "
                    "merge them into one with a count"
                )
            seen.add((link.src, link.dst))

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.gpus, self.links))

    def __hash__(self) -> int:  # planners cache by topology, so it must not cost a walk each time
        return self._hash

    @cached_property
    def by_ends(self) -> Mapping[tuple[Vertex, Vertex], Link]:
        """The link from one vertex straight to another."""
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Vertices that only pass traffic on, in order of first mention."""
        ends = (end for link in self.links for end in (link.src, link.dst))
        return tuple(dict.fromkeys(end for end in ends if isinstance(end, str)))

    @cached_property
    def _out(self) -> Mapping[Vertex, tuple[Vertex, ...]]:
        out: dict[Vertex, list[Vertex]] = {}
        for link in self.links:
            out.setdefault(link.src, []).append(link.dst)
        return {v: tuple(sorted(w, key=str)) for v, w in out.items()}

    @cached_property
    def hops(self) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        """For each ordered pair of GPUs that hardware joins: the vertices passed, ends included.

        A hop crosses switches but never another GPU: hardware does not route through GPUs.
        Fewest links first; ties by vertex name, so the choice is stable.
        """
        found: dict[tuple[int, int], tuple[Vertex, ...]] = {}
        for src in self.gpus:
            queue: deque[tuple[Vertex, ...]] = deque([(src,)])
            seen: set[Vertex] = {src}
            while queue:
                path = queue.popleft()
                for nxt in self._out.get(path[-1], ()):
                    if nxt in seen:
                        continue
                    seen.add(nxt)
                    if isinstance(nxt, int):
                        found[src, nxt] = (*path, nxt)
                    else:
                        queue.append((*path, nxt))
        return found

    def subset(self, gpus: Iterable[int]) -> Topology:
        """The same machine with these GPUs only, in this order (rank r is the r-th of them)."""
        chosen = tuple(gpus)
        if missing := [g for g in chosen if g not in self.gpus]:
            raise TopologyError(f"{self.name} has no GPU {missing[0]}; it has {list(self.gpus)}")
        if chosen == self.gpus:
            return self
        keep = set(chosen)
        links = tuple(
            link
            for link in self.links
            if all(isinstance(end, str) or end in keep for end in (link.src, link.dst))
        )
        name = f"{self.name}[{','.join(map(str, chosen))}]"
        return Topology(name, chosen, links, self.assumptions)

    def isomorphic_to(self, other: Topology) -> dict[int, int] | None:
        """A renumbering of this machine's GPUs that turns it into `other`, or None.

        Links must agree in kind, count and bandwidth; names, latencies and numbering are free.
        """
        import networkx as nx  # only here: planning and loading stay free of it

        def graph(topo: Topology) -> Any:
            g = nx.DiGraph()
            g.add_nodes_from((v, {"gpu": isinstance(v, int)}) for v in topo.gpus + topo.switches)
            for link in topo.links:
                g.add_edge(link.src, link.dst, wire=(link.kind, link.count, link.bandwidth))
            return g

        matcher = nx.algorithms.isomorphism.DiGraphMatcher(
            graph(self),
            graph(other),
            node_match=lambda a, b: a["gpu"] == b["gpu"],
            edge_match=lambda a, b: a["wire"] == b["wire"],
        )
        mapping = next(matcher.isomorphisms_iter(), None)
        return None if mapping is None else {g: mapping[g] for g in self.gpus}

    def to_json(self) -> str:
        """Stable JSON that `topology.load` reads back to an equal value."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": 1,
                "name": self.name,
                "gpus": list(self.gpus),
                "links": [asdict(link) for link in self.links],
                "assumptions": list(self.assumptions),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str, where: str = "topology JSON") -> Topology:
        """Read `to_json`'s form. Raises TopologyError naming the place where it is malformed."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(
                f"{where}: line {error.lineno} column {error.colno}: {error.msg}"
            ) from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise TopologyError(f'{where}: needs "format": "{_FORMAT}" at the top')
        if data.get("version") != 1:
            raise TopologyError(f"{where}: version {data.get('version')!r} is unknown; known: 1")
        shape = {"name": str, "gpus": list, "links": list}
        for key, kind in shape.items():
            if not isinstance(data.get(key), kind):
                raise TopologyError(f'{where}: "{key}" must be a {kind.__name__}')
        assumptions = data.get("assumptions", [])
        if not isinstance(assumptions, list):
            raise TopologyError(f'{where}: "assumptions" must be a list')
        links = []
        for i, entry in enumerate(data["links"]):
            try:
                links.append(Link(**entry))
            except TypeError:
                raise TopologyError(
                    f'{where}: links[{i}] must be an object with "src", "dst", "bandwidth" and '
                    f'optionally "count", "latency_us", "kind"; got {entry!r}'
                ) from None
        return Topology(
            data["name"], tuple(data["gpus"]), tuple(links), tuple(map(str, assumptions))
        )

    def cell(self, src: int, dst: int) -> str:
        """How the matrix shows the way from one GPU to another: NV2, PCI, MEM, X or - (no hop)."""
        if src == dst:
            return "X"
        path = self.hops.get((src, dst))
        if path is None:
            return "-"
        links = [self.by_ends[ends] for ends in zip(path, path[1:], strict=False)]
        narrow = min(links, key=lambda k: k.bandwidth * k.count)
        return KINDS[narrow.kind] + (str(narrow.count) if narrow.kind == "nvlink" else "")

    def __str__(self) -> str:
        width = max(5, *(len(f"GPU{g}") + 1 for g in self.gpus))
        rows = [" " * width + "".join(f"GPU{g}".rjust(width) for g in self.gpus)]
        for a in self.gpus:
            cells = "".join(self.cell(a, b).rjust(width) for b in self.gpus)
            rows.append(f"GPU{a}".ljust(width) + cells)
        lanes = sum(link.count for link in self.links)
        summary = f"{self.name}: {len(self.gpus)} GPUs, {lanes} directed links"
        if self.switches:
            summary += f", {len(self.switches)} switches"
        return "\n".join([summary, *rows, *(f"assumed: {a}" for a in self.assumptions)])
