"""Named machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Link, Vertex
from linkweave.topology.topology import Topology

NVLINK1 = speeds.nvlink(60)
MEMORY = 20_000_000_000  # copied bytes/s through one machine's memory, all ranks together
MAX_N = 4096


def both(
    a: Vertex, b: Vertex, bandwidth: int, count: int = 1, latency_us: float = 5.0,
    kind: str = "nvlink", assumed: bool = False,
) -> tuple[Link, Link]:  # fmt: skip
    return (
        Link(a, b, bandwidth, count, latency_us, kind, assumed),
        Link(b, a, bandwidth, count, latency_us, kind, assumed),
    )


def _machine(name: str, n: int, pairs: Iterable[tuple[Link, Link]], *assumptions: str) -> Topology:
    links = ordered(link for pair in pairs for link in pair)
    return Topology(name, tuple(range(n)), links, assumptions)


def switches_of_nvls(links: Iterable[Link], devices: Iterable[GpuId] = ()) -> tuple[str, ...]:
    """The NVSwitch of a machine, if it reduces: all GPUs must be of Hopper or later, or where their
    models are not told, have as many NVLinks into it as no GPU had before."""
    ports = {k.src: k.count for k in links if k.dst == "nvswitch"}
    sm = {d.gpu: d.sm for d in devices if d.sm}
    fine = all(
        sm[gpu] >= speeds.NVLS if gpu in sm else n >= speeds.NVLS_PORTS for gpu, n in ports.items()
    )
    return ("nvswitch",) if ports and fine else ()


def ordered(links: Iterable[Link]) -> tuple[Link, ...]:
    """Sort links by their ends: GPUs by number, then switches by name."""
    return tuple(sorted(links, key=lambda link: (_padded(link.src), _padded(link.dst))))


def _padded(vertex: Vertex) -> str:
    return f"{vertex:06d}" if isinstance(vertex, int) else vertex


# The hybrid cube mesh: two fully joined quads, and each GPU joined to its twin in the other.
#      0 1 2 3 4 5 6 7
#   0  . 1 1 2 2 . . .
#   1  1 . 2 1 . 2 . .
#   2  1 2 . 2 . . 1 .
#   3  2 1 2 . . . . 1
#   4  2 . . . . 1 1 2
#   5  . 2 . . 1 . 2 1
#   6  . . 1 . 1 2 . 2
#   7  . . . 1 2 1 2 .
_CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
_PCIE_FIGURES = "PCIe at 12 GB/s a port, 6 GB/s between the CPUs: NCCL's figures, not measured"


def _dgx1(name: str, nvlinks: Iterable[tuple[Link, Link]]) -> Topology:
    """On PCIe, two GPUs share a switch and two switches share a CPU."""
    pairs = list(nvlinks)
    pairs += [both(g, f"switch{g // 2}", speeds.PCIE, kind="pcie") for g in range(8)]
    pairs += [both(f"switch{s}", f"cpu{s // 2}", speeds.PCIE, kind="host") for s in range(4)]
    pairs.append(both("cpu0", "cpu1", speeds.QPI, kind="socket"))
    return _machine(name, 8, pairs, _PCIE_FIGURES)


def dgx1_v100() -> Topology:
    """DGX-1 with V100: 24 NVLinks of 25 GB/s, six a GPU, in the hybrid cube mesh."""
    return _dgx1("dgx1-v100", (both(a, b, speeds.NVLINK, n) for (a, b), n in _CUBE_MESH.items()))


def dgx1_p100() -> Topology:
    """DGX-1 with P100: the same pairs, all single, 20 GB/s."""
    return _dgx1("dgx1-p100", (both(a, b, NVLINK1) for a, b in _CUBE_MESH))


# Four modules of two dies each; links between two dies, by models 66 and 67 of RCCL's
# `rome_models.cc`. Others, 73 and 74, have the same wiring in another order.
_MI250X = {
    (0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4, (0, 4): 2, (2, 6): 2, (0, 6): 1, (2, 4): 1,
    (1, 3): 1, (1, 7): 1, (3, 5): 1, (5, 7): 1,
}  # fmt: skip
_XGMI = "xGMI links as AMD's data sheet has them; RCCL reckons with 72 to 75 % of that"


def mi250x() -> Topology:
    """Eight dies of four MI250X, joined by xGMI links of 50 GB/s."""
    pairs = (both(a, b, 50 * speeds.GB, n, kind="xgmi") for (a, b), n in _MI250X.items())
    return _machine("mi250x", 8, pairs, _XGMI)


def mi300x() -> Topology:
    """Eight MI300X, of which every two are joined by an xGMI link of 64 GB/s."""
    pairs = (both(a, b, 64 * speeds.GB, kind="xgmi") for a in range(8) for b in range(a + 1, 8))
    return _machine("mi300x", 8, pairs, _XGMI)


SWITCH_PLANES = "the NVSwitch planes are drawn as one non-blocking switch"


# GPUs; NVLinks of each GPU into NVSwitch; bytes/s of a link
_SWITCHED = {
    "dgx2": (16, 6, speeds.NVLINK),  # V100
    "dgx-a100": (8, 12, speeds.NVLINK),
    "dgx-h100": (8, 18, speeds.NVLINK),
    "dgx-h200": (8, 18, speeds.NVLINK),
    "dgx-b200": (8, 18, speeds.nvlink(100)),
    "gb200-nvl72": (72, 18, speeds.nvlink(100)),  # of 18 boards, with 4 GPUs each
}


def _switched(name: str) -> Topology:
    n, ports, bandwidth = _SWITCHED[name]
    pairs = (both(g, "nvswitch", bandwidth, ports) for g in range(n))
    made = _machine(name, n, pairs, SWITCH_PLANES)
    return replace(made, reducing=switches_of_nvls(made.links))


def mesh(n: int) -> Topology:
    """One 25 GB/s link between every two GPUs."""
    pairs = (both(a, b, speeds.NVLINK) for a in range(n) for b in range(a + 1, n))
    return _machine(f"mesh-{n}", n, pairs)


def ring(n: int) -> Topology:
    """A cycle of 25 GB/s links."""
    ends = {(min(a, b), max(a, b)) for a in range(n) for b in [(a + 1) % n] if a != b}
    return _machine(f"ring-{n}", n, (both(a, b, speeds.NVLINK) for a, b in sorted(ends)))


def pcie(n: int) -> Topology:
    """GPUs on 12 GB/s ports, four to a switch; each switch reaches the host by one such port."""
    pairs = [both(g, f"switch{g // 4}", speeds.PCIE, kind="pcie") for g in range(n)]
    if n > 4:
        switches = range((n + 3) // 4)
        pairs += [both(f"switch{s}", "host", speeds.PCIE, kind="host") for s in switches]
    return _machine(f"pcie-{n}", n, pairs)


def of_cards(machine: Topology, model: str) -> Topology:
    """`pcie`, on ports of the generation of a model of GPU, `mesh` or `ring` with such GPUs. Raises
    TopologyError for a model that is not known."""
    sm = speeds.known_model(model)
    port, apart = speeds.pcie_port(sm), len(machine.gpus) > 1 and speeds.without_peers(model)
    links = tuple(
        link if link.kind == "nvlink" else replace(link, bandwidth=port) for link in machine.links
    )
    told = (*machine.assumptions, *[speeds.PEERS] * apart)
    devices = tuple(GpuId(gpu, model=model, sm=sm) for gpu in machine.gpus)
    return replace(
        machine, name=f"{machine.name} of {model}", links=links, devices=devices, assumptions=told
    )


def cpu(n: int) -> Topology:
    """N processes that share one memory: all traffic crosses the same store -> load path.

    With more ranks than cores, a step waits until every rank has had its turn: 4 us for 4 ranks and
    18 us for 8, measured on two cores (`linkweave bench algorithms`).
    """
    latency_us = 0.4 if n <= 2 else n * n / 4
    port = [
        link
        for r in range(n)
        for link in (
            Link(r, "store", MEMORY, 1, latency_us, "memory"),
            Link("load", r, MEMORY, 1, latency_us, "memory"),
        )
    ]
    bus = Link("store", "load", MEMORY, 1, latency_us, "memory")
    return Topology(
        f"cpu-{n}",
        tuple(range(n)),
        ordered([*port, bus]) if n > 1 else (),
        (f"20 GB/s loaded by all ranks together, {latency_us:g} us a step: not measured here",),
    )


_FIXED: dict[str, Callable[[], Topology]] = {
    "dgx1-v100": dgx1_v100, "dgx1-p100": dgx1_p100,
    **{name: partial(_switched, name) for name in _SWITCHED}, "mi250x": mi250x, "mi300x": mi300x,
}  # fmt: skip
_SIZED: dict[str, Callable[[int], Topology]] = {
    "mesh": mesh, "ring": ring, "pcie": pcie, "cpu": cpu,
}  # fmt: skip

CLOUD = {
    "p3.16xlarge": ("dgx1-v100", "AWS"), "p3dn.24xlarge": ("dgx1-v100", "AWS"),
    "p4d.24xlarge": ("dgx-a100", "AWS"), "p4de.24xlarge": ("dgx-a100", "AWS"),
    "p5.48xlarge": ("dgx-h100", "AWS"), "p5e.48xlarge": ("dgx-h200", "AWS"),
    "p5en.48xlarge": ("dgx-h200", "AWS"), "p6-b200.48xlarge": ("dgx-b200", "AWS"),
    "nd40rs_v2": ("dgx1-v100", "Azure"), "nd96asr_v4": ("dgx-a100", "Azure"),
    "nd96amsr_a100_v4": ("dgx-a100", "Azure"), "nd96isr_h100_v5": ("dgx-h100", "Azure"),
    "nd96isr_h200_v5": ("dgx-h200", "Azure"), "a2-highgpu-8g": ("dgx-a100", "Google Cloud"),
    "a2-ultragpu-8g": ("dgx-a100", "Google Cloud"), "a3-highgpu-8g": ("dgx-h100", "Google Cloud"),
    "a3-megagpu-8g": ("dgx-h100", "Google Cloud"), "a3-ultragpu-8g": ("dgx-h200", "Google Cloud"),
    "a4-highgpu-8g": ("dgx-b200", "Google Cloud"),
}  # fmt: skip
"""Machines to rent whose GPUs are joined as those of a machine here, by the providers' lists of
instance types: eight of a kind, by NVLinks from V100 to V100 or by NVSwitch."""

NAMES = (*_FIXED, *(f"{family}-N" for family in _SIZED))


@lru_cache(maxsize=256)
def machine(name: str) -> Topology | None:
    """The machine of that name; None for other text, TopologyError for a size out of range."""
    if name in _FIXED:
        return _FIXED[name]()
    if (plain := name.lower().removeprefix("standard_")) in CLOUD:
        like, provider = CLOUD[plain]
        made = _FIXED[like]()
        told = f"GPUs joined as in {like}, by {provider}'s list of instance types; NICs not known"
        return replace(made, name=name, assumptions=(*made.assumptions, told))
    found = re.fullmatch(r"(\w+)-(-?\d{1,18})", name)
    if not found or found[1] not in _SIZED:
        return None
    n = int(found[2])
    if not 1 <= n <= MAX_N:
        raise TopologyError(f"{name}: the number of GPUs must be from 1 to {MAX_N}, not {n}")
    return _SIZED[found[1]](n)
