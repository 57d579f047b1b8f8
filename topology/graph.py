"""What is wired: directed links between GPUs and switches, as one immutable value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from linkweave.topology.errors import TopologyError
from linkweave.topology.routes import Vertex, between, connects, routes
from linkweave.topology.timings import Timing, timing_rows

KINDS = {
    "nvlink": ("NVLink", "NVLinks"),
    "pcie": ("PCIe link", "PCIe links"),
    "host": ("PCIe link to a CPU", "PCIe links to CPUs"),
    "socket": ("link between CPUs", "links between CPUs"),
    "network": ("network link", "network links"),
    "memory": ("memory path", "memory paths"),
}
"""Kinds of link, and what people call one and several of them."""

_FORMAT = "linkweave-topology"
_FASTEST, _MOST_LINKS, _SLOWEST_US = 10**15, 10**6, 1e12


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
        if self.bandwidth <= 0 or self.count <= 0 or not 0 <= self.latency_us <= _SLOWEST_US:
            raise TopologyError(
                f"{where}: bandwidth {self.bandwidth} and count {self.count} must be positive, "
                f"latency_us {self.latency_us} finite and not negative"
            )
        if self.bandwidth > _FASTEST or self.count > _MOST_LINKS:
            raise TopologyError(
                f"{where}: bandwidth is at most {_FASTEST:.0e} bytes/s, and count {_MOST_LINKS}"
            )
        if self.kind not in KINDS:
            raise TopologyError(
                f"{where}: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
            )

    @property
    def lanes(self) -> int:
        """How many messages pass side by side, each over one physical link.

        Between a GPU and a switch it is 1: messages are striped over all links of the port.
        """
        return self.count if isinstance(self.src, int) and isinstance(self.dst, int) else 1

    @property
    def stores(self) -> bool:
        """Whether it is a rank's way into common memory: what several read is stored there once."""
        return self.kind == "memory" and isinstance(self.src, int)

    @property
    def lane_bandwidth(self) -> int:
        """Bytes/s of one lane."""
        return self.bandwidth * self.count // self.lanes


@dataclass(frozen=True, slots=True)
class Device:
    """Who a GPU is: numbers change with CUDA_VISIBLE_DEVICES, these do not.

    `bus_id` is like "0000:06:00.0", in lower case; `sm` the compute capability times ten (70 for
    a V100). An empty text, or 0, is not known.
    """

    gpu: int
    bus_id: str = ""
    uuid: str = ""
    model: str = ""
    sm: int = 0

    def __post_init__(self) -> None:
        for name, number in (("gpu", self.gpu), ("sm", self.sm)):
            whole = isinstance(number, int) and not isinstance(number, bool)
            if not whole or not 0 <= number < 1e9:
                raise TopologyError(f"device: {name} must be an integer >= 0, not {number!r}")
        for name, text in (("bus_id", self.bus_id), ("uuid", self.uuid), ("model", self.model)):
            if not isinstance(text, str):
                raise TopologyError(f"device of GPU {self.gpu}: {name} must be text, not {text!r}")


@dataclass(frozen=True, eq=True)
class Topology:
    """A machine: GPUs, switches between them, directed links.

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

    def subset(self, gpus: Iterable[int], forwarders: Iterable[int] = ()) -> Topology:
        """The same machine with these GPUs only, in this order (rank r is the r-th of them).

        `forwarders` stay as well, without a rank: traffic may pass them.
        """
        chosen, helpers = tuple(gpus), tuple(forwarders)
        known = (*self.gpus, *self.forwarders)
        if missing := [g for g in (*chosen, *helpers) if g not in known]:
            raise TopologyError(f"{self.name} has no GPU {missing[0]}; it has {list(known)}")
        if (chosen, helpers) == (self.gpus, self.forwarders):
            return self
        keep = {*chosen, *helpers}
        links = tuple(
            link
            for link in self.links
            if all(isinstance(end, str) or end in keep for end in (link.src, link.dst))
        )
        name = f"{self.name}[{','.join(map(str, chosen))}]"
        if helpers:
            name += f" over {','.join(map(str, helpers))}"
        devices = tuple(device for device in self.devices if device.gpu in keep)
        return Topology(name, chosen, links, self.assumptions, devices, helpers)

    def find(self, bus_id: str = "", uuid: str = "") -> int:
        """The GPU with this PCI bus id or UUID. Raises TopologyError if there is none."""
        for device in self.devices:
            if (uuid and device.uuid == uuid) or (bus_id and device.bus_id == bus_id.lower()):
                return device.gpu
        raise TopologyError(
            f"{self.name} has no GPU {uuid or bus_id}; it knows "
            f"{', '.join(d.uuid or d.bus_id for d in self.devices) or 'none by UUID or bus id'}"
        )

    def isomorphic_to(self, other: Topology) -> dict[int, int] | None:
        """A renumbering of this machine's GPUs that turns it into `other`, or None.

        The fabrics are compared: their links must agree in kind, count and bandwidth. Names,
        latencies, numbering and the host beneath a machine that NVLink connects are free.
        """
        from linkweave.topology.symmetry import mappings

        mapping = next(mappings(self, other), None)
        return None if mapping is None else dict(mapping)

    def automorphisms(self) -> Iterator[Mapping[int, int]]:
        """Every renumbering of the GPUs that leaves the fabric as it is, the identity included.

        Lazy: behind a switch of n ports there are n! of them.
        """
        from linkweave.topology.symmetry import mappings

        return mappings(self, self)

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
                "devices": [asdict(device) for device in self.devices],
                "forwarders": list(self.forwarders),
                "timings": [asdict(timing) for timing in self.timings],
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
        except (ValueError, RecursionError) as error:  # a number, or a nest, of thousands
            raise TopologyError(f"{where}: {error}") from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise TopologyError(f'{where}: needs "format": "{_FORMAT}" at the top')
        if data.get("version") != 1:
            raise TopologyError(f"{where}: version {data.get('version')!r} is unknown; known: 1")
        shape = {"name": str, "gpus": list, "links": list}
        for key, kind in shape.items():
            if not isinstance(data.get(key), kind):
                raise TopologyError(f'{where}: "{key}" must be a {kind.__name__}')
        for key in ("assumptions", "devices", "forwarders", "timings"):
            if not isinstance(data.setdefault(key, []), list):
                raise TopologyError(f'{where}: "{key}" must be a list')
        links, devices = [], []
        for i, entry in enumerate(data["links"]):
            try:
                links.append(Link(**entry))
            except TypeError:
                raise TopologyError(
                    f'{where}: links[{i}] must be an object with "src", "dst", "bandwidth" and '
                    f'optionally "count", "latency_us", "kind"; got {_brief(entry)}'
                ) from None
        for i, entry in enumerate(data["devices"]):
            try:
                devices.append(Device(**entry))
            except TopologyError as error:
                raise TopologyError(f"{where}: devices[{i}]: {error}") from None
            except TypeError:
                raise TopologyError(
                    f'{where}: devices[{i}] must be an object with "gpu" and optionally "bus_id", '
                    f'"uuid", "model", "sm"; got {_brief(entry)}'
                ) from None
        return Topology(
            data["name"], tuple(data["gpus"]), tuple(links), tuple(map(str, data["assumptions"])),
            tuple(devices), tuple(data["forwarders"]), timing_rows(data["timings"], where),
        )  # fmt: skip

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

    def __str__(self) -> str:
        from linkweave.topology.text import describe

        return describe(self)


def _brief(entry: object) -> str:
    text = repr(entry)
    return text if len(text) <= 200 else f"{text[:200]}..."
