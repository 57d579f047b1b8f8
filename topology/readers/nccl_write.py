"""Write a machine as an NCCL topology, for NCCL_TOPO_FILE. `nccl_xml` describes the form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Link, Vertex
from linkweave.topology.loading import load
from linkweave.topology.readers.nccl_xml import LONGEST_VALUE
from linkweave.topology.topology import Topology

MOST_GPUS = 128
_HIDDEN = "fffffff:ffff:ff"  # what NCCL itself writes for an NVLink target that it cannot see
_CPU = re.compile(r"(?:cpu|host)(\d*)$")


def to_nccl_xml(topology: Topology | str) -> str:
    """Return the machine as NCCL's XML.

    Vertices called "cpu..." or "host..." become CPUs; GPUs under none of them go under the first.
    Unknown bus ids, CPU models and classes are invented, PCIe speeds are rounded to existing ones,
    and forwarders become GPUs without a rank. Raises TopologyError for clusters, CPU ranks,
    measured NVLinks, and names that are too long for NCCL. `topology` is a `Topology`, or what
    `topology.load` takes.
    """
    topology = load(topology)
    kinds = {link.kind for link in topology.fabric}
    if topology.on_memory:
        raise TopologyError(f"{topology.name} has CPU ranks: an NCCL topology is of GPUs")
    if "xgmi" in kinds:
        raise TopologyError(f"{topology.name} has xGMI links: NCCL's form is of NVIDIA's GPUs")
    if len(topology.gpus) > MOST_GPUS or "network" in kinds:
        raise TopologyError(
            f"{topology.name} has {len(topology.gpus)} GPUs: an NCCL topology is of one node "
            f"with GPUs, at most {MOST_GPUS}"
        )
    return "\n".join(_Writer(topology).lines()) + "\n"


class _Writer:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.near: dict[Vertex, list[Link]] = {}
        self.nvlinks: dict[Vertex, list[Link]] = {}
        for link in topology.links:
            kept = self.nvlinks if link.kind == "nvlink" else self.near
            kept.setdefault(link.src, []).append(link)
        ends = dict.fromkeys(v for k in topology.links for v in (k.src, k.dst))
        self.cpus = [v for v in ends if isinstance(v, str) and _CPU.fullmatch(v)]
        self.seen: set[Vertex] = set(self.cpus)
        known = {d.gpu: d for d in topology.devices}
        gpus = (*topology.gpus, *topology.forwarders)
        self.devices = {g: known.get(g) or GpuId(g) for g in gpus}
        taken = {d.bus_id for d in known.values()}
        made_up = (f"{i >> 8:04x}:{i & 255:02x}:00.0" for i in range(1, 1 << 24))
        self.free = (bus for bus in made_up if bus not in taken)
        self.bus = {g: d.bus_id or next(self.free) for g, d in self.devices.items()}

    def lines(self) -> Iterator[str]:
        yield '<system version="1">'
        cpus = self.cpus or ["cpu0"]
        under = {cpu: list(self.below(cpu, "    ")) for cpu in cpus}
        for g in self.devices:
            if g not in self.seen:
                under[cpus[0]] += self.orphan(g, "    ")
        for i, cpu in enumerate(cpus):
            vendor, family, model = speeds.cpu_as_written(self.socket(cpu))
            found = _CPU.fullmatch(cpu)
            yield (
                f'  <cpu numaid="{(found and found[1]) or i}" affinity="" arch="x86_64" '
                f'vendor="{vendor}" familyid="{family}" modelid="{model}">'
            )
            yield from under[cpu]
            yield "  </cpu>"
        yield "</system>"

    def socket(self, cpu: str) -> int:
        rates = [k.bandwidth for k in self.near.get(cpu, ()) if k.kind == "socket"]
        return max(rates, default=speeds.SOCKETS)

    def below(self, vertex: Vertex, indent: str) -> Iterator[str]:
        """Everything below a CPU or a switch, over PCIe or a CPU's NVLinks."""
        for link in (*self.near.get(vertex, ()), *self.nvlinks.get(vertex, ())):
            child = link.dst
            if child in self.seen or (link.kind == "nvlink" and vertex not in self.cpus):
                continue
            self.seen.add(child)
            if isinstance(child, int):
                yield from self.gpu(child, link, indent)
            elif link.kind == "network":
                yield from self.nic(child, link, indent)
            else:
                yield from self.switch(child, link.bandwidth, indent)

    def orphan(self, g: int, indent: str) -> Iterator[str]:
        """A GPU below no CPU, with its PCIe switch if it has one."""
        up = [k for k in self.near.get(g, ()) if isinstance(k.dst, str)]
        if up:
            self.seen.add(up[0].dst)
            yield from self.switch(up[0].dst, up[0].bandwidth, indent)
        else:
            self.seen.add(g)
            yield from self.gpu(g, None, indent)

    def switch(self, name: Vertex, bandwidth: int, indent: str) -> Iterator[str]:
        yield f"{indent}<pci {self.slot(next(self.free), '0x060400', bandwidth)}>"
        yield from self.below(name, indent + "  ")
        yield f"{indent}</pci>"

    def slot(self, bus: str, class_: str, bandwidth: int) -> str:
        speed, width = speeds.pcie_as_written(bandwidth)
        return f'busid="{bus}" class="{class_}" link_speed="{speed}" link_width="{width}"'

    def gpu(self, g: int, link: Link | None, indent: str) -> Iterator[str]:
        nvlinks = self.nvlinks.get(g, [])
        sm = self.generation(g, nvlinks)
        port = link.bandwidth if link and link.kind != "nvlink" else speeds.PCIE
        rank = f' rank="{self.topology.gpus.index(g)}"' if g in self.topology.gpus else ""
        yield f"{indent}<pci {self.slot(self.bus[g], '0x030200', port)}>"
        yield f'{indent}  <gpu dev="{g}" sm="{sm}"{rank} gdr="1">'
        for k in nvlinks:
            if isinstance(k.dst, int):
                target, class_ = self.bus[k.dst], "0x030200"
            else:
                target, class_ = _HIDDEN, "0x068001" if k.dst in self.cpus else "0x068000"
            yield f'{indent}    <nvlink target="{target}" count="{k.count}" tclass="{class_}"/>'
        written = speeds.pcie(*speeds.pcie_as_written(port))
        if link and link.dst == g and link.kind == "host" and (link.count > 1 or written != port):
            yield f'{indent}    <c2c bw="{port // 10**6}" count="{link.count}"/>'
        yield f"{indent}  </gpu>"
        yield f"{indent}</pci>"

    def generation(self, g: int, nvlinks: list[Link]) -> int:
        """The compute capability, from which NCCL derives the speed of NVLinks."""
        rates = {k.bandwidth for k in nvlinks}
        sm = self.devices[g].sm or speeds.generation(max(rates, default=speeds.NVLINK))
        if self.topology.reducing and not self.devices[g].sm:
            sm = max(sm, speeds.NVLS)
        if odd := [rate for rate in rates if rate != speeds.nvlink(sm)]:
            raise TopologyError(
                f"{self.topology.name}: GPU {g} has NVLinks of {odd[0] / 1e9:g} GB/s; NCCL's form "
                "knows them by the GPU's generation only: write the machine without measured "
                "figures"
            )
        return sm

    def nic(self, name: str, link: Link, indent: str) -> Iterator[str]:
        if len(name) > LONGEST_VALUE:
            raise TopologyError(f"{self.topology.name}: NIC {name[:40]}... has too long a name")
        port = self.slot(next(self.free), "0x020000", max(link.bandwidth, speeds.PCIE))
        dev = len(self.seen)
        yield f"{indent}<pci {port}>"
        yield f"{indent}  <nic>"
        yield (
            f'{indent}    <net name={quoteattr(name)} dev="{dev}" latency="0" '
            f'speed="{link.bandwidth * 8 // 10**6}" port="1" guid="0x{dev:x}" maxconn="128" '
            'gdr="1"/>'
        )
        yield f"{indent}  </nic>"
        yield f"{indent}</pci>"
