"""Links and devices of a machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from linkweave.topology.checks import integer, number
from linkweave.topology.errors import TopologyError
from linkweave.topology.routes import Vertex

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
