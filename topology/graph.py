"""A machine as a graph: links, devices, and the paths over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from linkweave.topology.checks import TopologyError, integer, number
from linkweave.topology.timings import Timing

Vertex = int | str  # GPUs and CPU ranks are ints; switches, CPUs, NICs and buses are strings

Ends = tuple[Vertex, Vertex]
V = TypeVar("V", bound=Hashable)


# the kinds of link, with the singular and plural that messages use
KINDS = {
    "nvlink": ("NVLink", "NVLinks"),
    "xgmi": ("xGMI link", "xGMI links"),
    "pcie": ("PCIe link", "PCIe links"),
    "host": ("PCIe link to a CPU", "PCIe links to CPUs"),
    "socket": ("link between CPUs", "links between CPUs"),
    "network": ("network link", "network links"),
    "memory": ("memory path", "memory paths"),
}
DIRECT = ("nvlink", "xgmi")  # those that are made for GPUs

FASTEST, _MOST_LINKS, _SLOWEST_US, LARGEST = 10**15, 10**6, 1e12, 10**9 - 1


@dataclass(frozen=True, slots=True)
class Link:
    """`count` equal physical links side by side, in one direction.

    `bandwidth` is that of one physical link in bytes/s. `latency_us` is the fixed cost of a chunk
    step over the link in microseconds (alpha in the cost model). `kind` is one of `KINDS`.
    `assumed` marks a bandwidth that was guessed because the GPU, CPU or NIC is not known;
    comparisons ignore it. Raises TopologyError for values that make no sense.
    """

    src: Vertex
    dst: Vertex
    bandwidth: int
    count: int = 1
    latency_us: float = 5.0
    kind: str = "nvlink"
    assumed: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        where = f"link {self.src}->{self.dst}"
        for name, end in (("src", self.src), ("dst", self.dst)):
            if isinstance(end, bool) or not isinstance(end, int | str):
                raise TopologyError(f"{where}: {name} must be a GPU number or a switch name")
        if self.src == self.dst:
            raise TopologyError(f"{where} joins a vertex to itself")
        for name, most in (("bandwidth", FASTEST), ("count", _MOST_LINKS)):
            value = integer(getattr(self, name), f"{where}: {name}", 1, most, TopologyError)
            object.__setattr__(self, name, value)
        number(self.latency_us, f"{where}: latency_us", 0, _SLOWEST_US, TopologyError)
        if not isinstance(self.assumed, bool):
            raise TopologyError(f"{where}: assumed must be true or false, not {self.assumed!r}")
        if self.kind not in KINDS:
            raise TopologyError(
                f"{where}: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
            )

    @property
    def parallel(self) -> int:
        """How many messages can travel at once, each over one physical link.

        It is 1 between a GPU and a switch, where every message is striped over all links.
        """
        return self.count if isinstance(self.src, int) and isinstance(self.dst, int) else 1

    @property
    def stores(self) -> bool:
        """Whether a rank writes to shared memory over it, where one copy serves all readers."""
        return self.kind == "memory" and isinstance(self.src, int)

    @property
    def bandwidth_each(self) -> int:
        """Bytes/s of each of the `parallel` messages."""
        return self.bandwidth * self.count // self.parallel


@dataclass(frozen=True, slots=True)
class GpuId:
    """Identifies a GPU, whose number depends on CUDA_VISIBLE_DEVICES.

    `bus_id` looks like "0000:06:00.0", in lower case. `sm` is the compute capability times ten (70
    for a V100). Empty strings and 0 stand for unknown values.
    """

    gpu: int
    bus_id: str = ""
    uuid: str = ""
    model: str = ""
    sm: int = 0

    def __post_init__(self) -> None:
        for name in ("gpu", "sm"):
            value = integer(getattr(self, name), f"device: {name}", 0, LARGEST, TopologyError)
            object.__setattr__(self, name, value)
        for name, text in (("bus_id", self.bus_id), ("uuid", self.uuid), ("model", self.model)):
            if not isinstance(text, str):
                raise TopologyError(f"device of GPU {self.gpu}: {name} must be text, not {text!r}")


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
        ways = between([(k.src, k.dst) for k in self.links])
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


def routes(
    links: Iterable[Ends], gpus: Collection[int]
) -> dict[tuple[int, int], tuple[Vertex, ...]]:
    """Return a shortest path for each ordered pair of these GPUs that has one.

    Paths cross switches but no other GPU. Vertex names decide between paths of equal length.
    """
    out = {v: sorted(near, key=str) for v, near in neighbours(links).items()}
    wanted = set(gpus)
    found: dict[tuple[int, int], tuple[Vertex, ...]] = {}
    for src in gpus:
        queue: deque[tuple[Vertex, ...]] = deque([(src,)])
        seen: set[Vertex] = {src}
        while queue:
            path = queue.popleft()
            for nxt in out.get(path[-1], ()):
                if nxt in seen:
                    continue
                seen.add(nxt)
                if isinstance(nxt, str):
                    queue.append((*path, nxt))
                elif nxt in wanted:
                    found[src, nxt] = (*path, nxt)
    return found


def connects(links: Sequence[Ends], gpus: Sequence[int]) -> bool:
    """Whether every GPU can send to every other, through switches and GPUs."""
    ways = (links, [(b, a) for a, b in links])
    return all(set(gpus) <= reach(neighbours(way), gpus[0]) for way in ways)


def neighbours(links: Iterable[tuple[V, V]]) -> dict[V, list[V]]:
    """The successors of each vertex."""
    out: dict[V, list[V]] = {}
    for src, dst in links:
        out.setdefault(src, []).append(dst)
    return out


def reach(near: Mapping[V, Iterable[V]], start: V) -> set[V]:
    """The vertices that can be reached from `start`, with `start` itself."""
    seen, todo = {start}, [start]
    while todo:
        fresh = set(near.get(todo.pop(), ())) - seen
        seen |= fresh
        todo += fresh
    return seen


def groups(members: Iterable[V], joined: Iterable[tuple[V, V]]) -> list[list[V]]:
    """Connected components of the undirected graph with edges `joined`, in member order."""
    near = neighbours(ends for a, b in joined for ends in ((a, b), (b, a)))
    found: list[list[V]] = []
    component_of: dict[V, list[V]] = {}
    for member in members:
        if member not in component_of:
            found.append([])
            component_of |= dict.fromkeys(reach(near, member), found[-1])
        component_of[member].append(member)
    return found


def between(links: Sequence[Ends]) -> set[Ends]:
    """Drop links to switches with one neighbour until no such switch is left."""
    left = set(links)
    near: dict[Vertex, set[Vertex]] = {}
    for src, dst in left:
        near.setdefault(src, set()).add(dst)
        near.setdefault(dst, set()).add(src)
    ends = [v for v in near if isinstance(v, str) and len(near[v]) < 2]
    while ends:
        v = ends.pop()
        for other in near.pop(v, ()):
            left -= {(v, other), (other, v)}
            near[other].discard(v)
            if isinstance(other, str) and len(near[other]) == 1:
                ends.append(other)
    return left
