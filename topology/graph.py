"""Directed links between GPUs and switches, and the paths over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from linkweave.topology.checks import integer
from linkweave.topology.errors import TopologyError
from linkweave.topology.link import DIRECT, LARGEST, GpuId, Link
from linkweave.topology.routes import Vertex, between, connects, routes
from linkweave.topology.timings import Timing


@dataclass(frozen=True, eq=True)
class Graph:
    """GPUs, switches between them, directed links.

    Rank r of a plan runs on `gpus[r]`; subsets keep the numbers of their GPUs. `forwarders` are
    GPUs without a rank that only pass traffic on. `assumptions` lists what a reader had to guess.
    Raises TopologyError if links contradict each other or name unknown GPUs.
    """

    name: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    assumptions: tuple[str, ...] = ()
    devices: tuple[GpuId, ...] = ()
    forwarders: tuple[int, ...] = ()
    timings: tuple[Timing, ...] = ()  # measured times of all-reduces on this machine
    reducing: tuple[str, ...] = ()
    """Switches that add what several ports send, and copy to several ports, as NVSwitches do from
    Hopper on (NVLS)."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise TopologyError(f"{self.name}: a topology needs at least one GPU")
        gpus = (*self.gpus, *self.forwarders)
        for gpu in gpus:
            integer(gpu, f"{self.name}: a GPU number", 0, LARGEST, TopologyError)
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
        # links may have been taken away since
        left = tuple(switch for switch in self.reducing if switch in self.switches)
        object.__setattr__(self, "reducing", left)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.gpus, self.links))

    def __hash__(self) -> int:  # planners cache by topology, so it must not cost a walk each time
        return self._hash

    @cached_property
    def by_ends(self) -> Mapping[tuple[Vertex, Vertex], Link]:
        """Each link by its (src, dst)."""
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Switches, CPUs, NICs and buses, in the order of `links`."""
        ends = (end for link in self.links for end in (link.src, link.dst))
        return tuple(dict.fromkeys(end for end in ends if isinstance(end, str)))

    @cached_property
    def fabric(self) -> tuple[Link, ...]:
        """The links that collectives use.

        NVLinks or xGMI links alone if they connect all GPUs; otherwise all links except dead ends,
        such as a NIC of a machine that is not part of a cluster.
        """
        direct = tuple(link for link in self.links if link.kind in DIRECT)
        if connects([(k.src, k.dst) for k in direct], self.gpus):
            return direct
        ways = between([(k.src, k.dst) for k in self.links], (*self.gpus, *self.forwarders))
        return tuple(link for link in self.links if (link.src, link.dst) in ways)

    @cached_property
    def on_memory(self) -> bool:
        """Whether these are CPU ranks, which share one memory."""
        return any(link.kind == "memory" for link in self.links)

    @property
    def noun(self) -> str:
        """What this machine's ranks are called: "GPU", or "rank" on CPUs."""
        return "rank" if self.on_memory else "GPU"

    @cached_property
    def hops(self) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        """The path between each ordered pair of GPUs, as vertices with both ends.

        Paths may cross switches but not other GPUs, because hardware does not route through GPUs.
        NVLinks and xGMI links are preferred, then fewer links, then vertex names. Pairs without a
        path are absent.
        """
        return self._routes(self.fabric)

    @cached_property
    def ways(self) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        """Like `hops`, but over all links, as in `nvidia-smi topo -m`."""
        return self.hops if self.fabric == self.links else self._routes(self.links)

    def _routes(self, links: Iterable[Link]) -> Mapping[tuple[int, int], tuple[Vertex, ...]]:
        ends = [(link.src, link.dst) for link in links]
        fast = [e for e in ends if self.by_ends[e].kind in DIRECT]
        found = routes(fast, self.gpus)
        if len(fast) < len(ends):
            found = {**routes(ends, self.gpus), **found}
        return found

    def find(self, bus_id: str = "", uuid: str = "") -> int:
        """Return the GPU with this PCI bus id or UUID; TopologyError if there is none."""
        for device in self.devices:
            if (uuid and device.uuid == uuid) or (bus_id and device.bus_id == bus_id.lower()):
                return device.gpu
        raise TopologyError(
            f"{self.name} has no GPU {uuid or bus_id}; it knows "
            f"{', '.join(d.uuid or d.bus_id for d in self.devices) or 'none by UUID or bus id'}"
        )

    def cell(self, src: int, dst: int) -> str:
        """Describe the path between two GPUs as nvidia-smi does, in the words of `text.matrix`.

        nvidia-smi's NODE is shown as PHB.
        """
        if src == dst:
            return "X"
        path = self.ways.get((src, dst))
        if path is None:
            return "-"
        links = [self.by_ends[ends] for ends in zip(path, path[1:], strict=False)]
        kinds = {link.kind for link in links}
        for kind in DIRECT:
            if kinds == {kind}:
                return f"{kind[:2].upper()}{min(link.count for link in links)}"
        for kind, cell in (
            ("network", "NET"), ("memory", "MEM"), ("socket", "SYS"), ("host", "PHB"),
        ):  # fmt: skip
            if kind in kinds:
                return cell
        return "PIX" if len(links) == 2 else "PXB"
