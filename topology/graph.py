"""What is wired: directed links between GPUs and switches, and the ways over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from linkweave.topology.errors import TopologyError
from linkweave.topology.link import Device, Link
from linkweave.topology.routes import Vertex, between, connects, routes
from linkweave.topology.timings import Timing


@dataclass(frozen=True, eq=True)
class Graph:
    """GPUs, switches between them, directed links.

    Rank r of a plan is `gpus[r]`; a subset keeps its GPUs' numbers. `forwarders` are GPUs that
    have no rank and only pass traffic on. What a reader had to assume stands in `assumptions`.
    Raises TopologyError where it contradicts itself.
    """

    name: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    assumptions: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    forwarders: tuple[int, ...] = ()
    timings: tuple[Timing, ...] = ()
    """Measured times of all-reduces on this machine, if there are any."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise TopologyError(f"{self.name}: a topology needs at least one GPU")
        gpus = (*self.gpus, *self.forwarders)
        if any(isinstance(g, bool) or not isinstance(g, int) or not 0 <= g < 1e9 for g in gpus):
            raise TopologyError(f"{self.name}: GPU numbers must be integers >= 0, not {gpus}")
        if len(set(gpus)) != len(gpus):
            raise TopologyError(f"{self.name}: a GPU is listed twice in {gpus}")
        if stray := [d.gpu for d in self.devices if d.gpu not in gpus]:
            raise TopologyError(f"{self.name}: a device is of GPU {stray[0]}, not among {gpus}")
        known, seen = set(gpus), set()
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
    def fabric(self) -> tuple[Link, ...]:
        """The links that collectives use: NVLinks alone where they connect the GPUs, else all.

        Of all links, those that lead nowhere (a NIC of a single machine) are left out.
        """
        nvlinks = tuple(link for link in self.links if link.kind == "nvlink")
        if connects([(k.src, k.dst) for k in nvlinks], self.gpus):
            return nvlinks
        ways = between([(k.src, k.dst) for k in self.links], (*self.gpus, *self.forwarders))
        return tuple(link for link in self.links if (link.src, link.dst) in ways)

    @cached_property
    def on_memory(self) -> bool:
        """Whether these are CPU ranks, which share one memory."""
        return any(link.kind == "memory" for link in self.links)

    @cached_property
    def hops(self) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        """For each ordered pair of GPUs that the fabric joins: the vertices passed, ends included.

        A hop crosses switches but never another GPU: hardware does not route through GPUs.
        NVLink where it joins the two, else the fewest links; ties by vertex name.
        """
        return self._routes(self.fabric)

    @cached_property
    def ways(self) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        """As `hops`, but over all links: what `nvidia-smi topo -m` would show."""
        return self.hops if self.fabric == self.links else self._routes(self.links)

    def _routes(self, links: Iterable[Link]) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        ends = [(link.src, link.dst) for link in links]
        fast = [e for e in ends if self.by_ends[e].kind == "nvlink"]
        found = routes(fast, self.gpus)
        if len(fast) < len(ends):
            found = {**routes(ends, self.gpus), **found}
        return found

    def find(self, bus_id: str = "", uuid: str = "") -> int:
        """The GPU with this PCI bus id or UUID. Raises TopologyError if there is none."""
        for device in self.devices:
            if (uuid and device.uuid == uuid) or (bus_id and device.bus_id == bus_id.lower()):
                return device.gpu
        raise TopologyError(
            f"{self.name} has no GPU {uuid or bus_id}; it knows "
            f"{', '.join(d.uuid or d.bus_id for d in self.devices) or 'none by UUID or bus id'}"
        )

    def cell(self, src: int, dst: int) -> str:
        """How the matrix shows the way from one GPU to another, in nvidia-smi's words.

        NV2 (two NVLinks), PIX (one PCIe switch), PXB (several), PHB (a CPU; NODE, its several
        bridges, is not told apart), SYS (several CPUs),
        NET (a network), MEM (one memory), X (itself) or - (no way but through GPUs).
        """
        if src == dst:
            return "X"
        path = self.ways.get((src, dst))
        if path is None:
            return "-"
        links = [self.by_ends[ends] for ends in zip(path, path[1:], strict=False)]
        kinds = {link.kind for link in links}
        if kinds == {"nvlink"}:
            return f"NV{min(link.count for link in links)}"
        for kind, cell in (
            ("network", "NET"), ("memory", "MEM"), ("socket", "SYS"), ("host", "PHB"),
        ):  # fmt: skip
            if kind in kinds:
                return cell
        return "PIX" if len(links) == 2 else "PXB"
