"""NCCL's topology files: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.

The schema is that of NCCL's src/graph/xml.cc and topo.cc, version 1: `system` holds `cpu` (one a
NUMA node), which holds `pci` bridges and devices, which hold `gpu` (with `nvlink` and `c2c`) or
`nic` (with `net`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from xml.sax.saxutils import quoteattr

from topology import speeds
from topology.errors import TopologyError
from topology.graph import Device, Link, Topology
from topology.machines import both, ordered
from topology.routes import Vertex
from topology.xml_tree import Element, parse_xml

_GPU_CLASS, _SWITCH_CLASS, _CPU_CLASS = "0x03", "0x068000", "0x068001"
_HIDDEN = "fffffff:ffff:ff"  # what NCCL writes for an NVLink target that it cannot see
_MOST_COUNT = 1 << 30


def parse_nccl_xml(text: str, name: str = "NCCL topology") -> Topology:
    """The machine of an NCCL topology file. GPU numbers are the file's `dev`, in their order.

    Raises TopologyError, with the line, for a file of another kind, without GPUs, or whose NVLinks
    contradict each other.
    """
    root = parse_xml(text, name)
    if root.tag == "graphs":
        raise TopologyError(
            f"{name} is an NCCL graph file (the rings and trees that NCCL chose), not a topology: "
            "dump that with NCCL_TOPO_DUMP_FILE"
        )
    if root.tag != "system":
        raise TopologyError(f"{name}: line {root.line}: <{root.tag}> is not NCCL's <system>")
    if root.attributes.get("version") != "1":
        raise TopologyError(
            f"{name}: line {root.line}: version {root.attributes.get('version')!r} of NCCL's "
            "topology; only 1 is known"
        )
    return _Reader(name).read(root)


@dataclass
class _Gpu:
    element: Element
    device: Device
    at: str  # its CPU


@dataclass
class _Reader:
    name: str
    links: list[Link] = field(default_factory=list)
    gpus: list[_Gpu] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"nvswitch"})
    assumed: list[str] = field(default_factory=list)
    cpu: str = ""  # beneath which we are
    switches: int = 0

    def fail(self, element: Element, what: str) -> TopologyError:
        return TopologyError(f"{self.name}: line {element.line}: <{element.tag}> {what}")

    def number(self, element: Element, key: str, default: int | None = None) -> int:
        value = element.attributes.get(key)
        if value is None and default is not None:
            return default
        try:
            found = int(value or "")
        except ValueError:
            raise self.fail(element, f"needs a whole number {key}, not {value!r}") from None
        if abs(found) > _MOST_COUNT:
            raise self.fail(element, f"{key}={found} is out of all proportion")
        return found

    def text(self, element: Element, key: str) -> str:
        if not (value := element.attributes.get(key, "")):
            raise self.fail(element, f"needs {key}")
        return value

    def read(self, root: Element) -> Topology:
        if not any(e.tag == "gpu" for e in root.walk()):
            places = sum(
                e.tag == "pci" and e.attributes.get("class", "").startswith(_GPU_CLASS)
                for e in root.walk()
            )
            hint = f"it has {places} places for GPUs, which NCCL fills in on the machine: " * (
                places > 0
            )
            raise TopologyError(
                f"{self.name} has no <gpu> elements: {hint}dump the whole topology there with "
                "NCCL_TOPO_DUMP_FILE"
            )
        cpus = list(root.all("cpu"))
        if len({cpu.attributes.get("host_hash") for cpu in cpus}) > 1:
            raise TopologyError(f"{self.name} is of several hosts: give one host's, as a node")
        named = []
        for cpu in cpus:
            at = f"cpu{self.number(cpu, 'numaid')}"
            if at in named:
                raise self.fail(cpu, f"comes twice with numaid {at[3:]}")
            named.append(at)
        self.names.update(named)
        for cpu, self.cpu in zip(cpus, named, strict=True):
            self.below(cpu, self.cpu, "host")
        rate = [self.socket(cpu) for cpu in cpus]
        for (a, x), (b, y) in combinations(zip(named, rate, strict=True), 2):
            self.links += both(a, b, min(x, y), kind="socket")
        numbers = [gpu.device.gpu for gpu in self.gpus]
        for gpu in self.gpus:
            if numbers.count(gpu.device.gpu) > 1:
                raise self.fail(gpu.element, f"comes twice with dev {gpu.device.gpu}")
        self.gpus.sort(key=lambda gpu: gpu.device.gpu)
        self.nvlinks()
        devices = tuple(gpu.device for gpu in self.gpus)
        return Topology(
            self.name, tuple(d.gpu for d in devices), ordered(self.links),
            tuple(dict.fromkeys(self.assumed)), devices,
        )  # fmt: skip

    def socket(self, cpu: Element) -> int:
        a = cpu.attributes
        ids = (self.number(cpu, "familyid", 0), self.number(cpu, "modelid", 0))
        found = speeds.sockets(a.get("arch", ""), a.get("vendor", ""), *ids)
        if found is None:
            self.assumed.append(
                f"unknown CPU {a.get('vendor', '')!r}: {speeds.SOCKETS / 1e9:g} GB/s between CPUs"
            )
        return found or speeds.SOCKETS

    def below(self, element: Element, at: str, kind: str) -> None:
        """All that hangs under a CPU or a switch."""
        for child in element.children:
            if child.tag == "nic":
                self.nets(child, at, None)
            elif child.tag == "pci":
                self.pci(child, at, kind)

    def pci(self, pci: Element, at: str, kind: str) -> None:
        self.text(pci, "class")
        bus_id = self.text(pci, "busid").lower()
        width = self.number(pci, "link_width", 16)
        bandwidth = speeds.pcie(pci.attributes.get("link_speed", ""), width)
        gpus, nics = list(pci.all("gpu")), list(pci.all("nic"))
        holds = any(e.tag in ("gpu", "nic") for c in pci.children for e in c.walk())
        if not holds:
            return  # a bridge, or a device, that nothing of interest hangs under
        if bandwidth is None or bandwidth <= 0:
            bandwidth = speeds.PCIE
            self.assumed.append(
                f"PCIe speed {pci.attributes.get('link_speed', '')!r} is not known: "
                f"{speeds.PCIE / 1e9:g} GB/s"
            )
        for gpu in gpus:
            found = Device(
                self.number(gpu, "dev"), bus_id if len(gpus) == 1 else "", sm=self.number(gpu, "sm")
            )
            if found.gpu < 0:
                raise self.fail(gpu, f"has dev {found.gpu}; devices count from 0")
            self.gpus.append(_Gpu(gpu, found, self.cpu))
            self.links += both(found.gpu, at, bandwidth, kind=kind)
        for nic in nics:
            self.nets(nic, at, bandwidth)
        if not gpus and not nics:
            switch = self.fresh(f"switch{self.switches}")
            self.switches += 1
            self.links += both(switch, at, bandwidth, kind=kind)
            self.below(pci, switch, "pcie")

    def nets(self, nic: Element, at: str, port: int | None) -> None:
        """The ports of a NIC: as fast as their network, or the PCIe link if that is slower."""
        for net in nic.all("net"):
            mbps = self.number(net, "speed", 0)
            speed = mbps * 10**6 // 8 if mbps > 0 else speeds.NETWORK
            if mbps <= 0:
                self.assumed.append(f"speed of the NICs not told: {speed / 1e9:g} GB/s each")
            name = self.fresh(net.attributes.get("name") or f"net{self.number(net, 'dev', 0)}")
            self.links += both(name, at, min(speed, port or speed), kind="network")

    def fresh(self, wanted: str) -> str:
        """A name for a vertex that no other has."""
        name = next(n for n in (wanted, *(f"{wanted}.{i}" for i in range(2, len(self.names) + 3)))
                    if n not in self.names)  # fmt: skip
        self.names.add(name)
        return name

    def nvlinks(self) -> None:
        """GPU to GPU; to NVSwitches, drawn as one; to CPUs; and chip to chip."""
        by_bus = {gpu.device.bus_id: gpu.device.gpu for gpu in self.gpus if gpu.device.bus_id}
        rate = {gpu.device.gpu: speeds.nvlink(gpu.device.sm) for gpu in self.gpus}
        direct: dict[tuple[int, int], tuple[int, Element]] = {}
        for gpu in self.gpus:
            me, counts = gpu.device.gpu, Counter[str]()
            for link in gpu.element.all("nvlink"):
                target, n = self.text(link, "target").lower(), self.number(link, "count")
                kind = link.attributes.get("tclass", "")
                if n <= 0:
                    raise self.fail(link, f"has count {n}")
                if target in by_bus:
                    other = by_bus[target]
                    if other == me:
                        raise self.fail(link, f"joins GPU {me} to itself")
                    direct[me, other] = (direct.get((me, other), (0, link))[0] + n, link)
                elif kind.startswith(_GPU_CLASS):
                    self.assumed.append(
                        f"GPU {me} has NVLinks to {target}, which is not in the file: left out"
                    )
                else:
                    counts["cpu" if kind == _CPU_CLASS else "nvswitch"] += n
            for to, n in counts.items():
                self.replace(both(me, gpu.at if to == "cpu" else to, rate[me], n))
            for link in gpu.element.all("c2c"):
                each, n = self.number(link, "bw") * 10**6, self.number(link, "count")
                if each <= 0 or n <= 0:
                    raise self.fail(link, f"has bw {each // 10**6} and count {n}")
                self.replace(both(me, gpu.at, each, n, kind="host"))
        for (a, b), (n, element) in direct.items():
            back = direct.get((b, a), (0, element))[0]
            if n != back:
                raise self.fail(
                    element, f"joins GPU {a} to GPU {b} by {n} NVLinks, but back there are {back}"
                )
            if a < b:
                self.links += both(a, b, min(rate[a], rate[b]), n)

    def replace(self, links: Sequence[Link]) -> None:
        """Add links; a slower one between the same ends, PCIe beside chip to chip, gives way."""
        for link in links:
            self.links = [k for k in self.links if (k.src, k.dst) != (link.src, link.dst)]
            self.links.append(link)


def to_nccl_xml(topology: Topology) -> str:
    """The machine in NCCL's form, for NCCL_TOPO_FILE.

    CPUs are the vertices that end a "socket" link, or a "host" link that starts elsewhere; a
    machine that has none gets one with all GPUs beneath it. Bus ids, CPU models and classes that
    are not known are made up. PCIe speeds are the nearest that exist. Raises TopologyError for more
    than one node.
    """
    return "\n".join(_Writer(topology).lines()) + "\n"


class _Writer:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.down: dict[Vertex, list[Link]] = {}
        self.cpus = _cpus(topology)
        self.seen: set[Vertex] = set(self.cpus)
        hosts = [k for k in topology.links if k.kind in ("host", "pcie", "network")]
        for link in hosts:
            self.down.setdefault(link.src, []).append(link)
        known = {d.gpu: d for d in topology.devices}
        if len(topology.gpus) > 128:
            raise TopologyError(
                f"{topology.name} has {len(topology.gpus)} GPUs: an NCCL topology is of one node"
            )
        self.devices = {
            g: known.get(g) or Device(g) for g in (*topology.gpus, *topology.forwarders)
        }
        taken = {d.bus_id for d in known.values()}
        made_up = (f"0000:{i:02x}:00.0" for i in range(1, 1 << 16))
        free = (bus for bus in made_up if bus not in taken)
        self.bus = {g: d.bus_id or next(free) for g, d in self.devices.items()}
        self.free = free

    def lines(self) -> Iterator[str]:
        yield '<system version="1">'
        orphans = [g for g in self.devices if not self.host_links(g)]
        for i, cpu in enumerate(self.cpus or ["cpu0"]):
            vendor, family, model = speeds.cpu_as_written(self.socket(cpu))
            numa = re.sub(r".*?(\d+)$", r"\1", cpu) if re.search(r"\d$", cpu) else str(i)
            yield (
                f'  <cpu numaid="{numa}" affinity="" arch="x86_64" vendor="{vendor}" '
                f'familyid="{family}" modelid="{model}">'
            )
            yield from self.below(cpu, "    ")
            if i == 0:
                for g in orphans:
                    yield from self.gpu(g, speeds.PCIE, "    ")
            yield "  </cpu>"
        yield "</system>"
        if lost := [g for g in self.devices if g not in self.seen]:
            raise TopologyError(
                f"{self.topology.name}: GPU {lost[0]} hangs under no CPU, as NCCL's form needs"
            )

    def host_links(self, gpu: int) -> list[Link]:
        return [k for k in self.down.get(gpu, ()) if k.kind in ("host", "pcie")]

    def socket(self, cpu: str) -> int:
        rates = [k.bandwidth for k in self.topology.links if k.kind == "socket" and k.src == cpu]
        return max(rates, default=speeds.SOCKETS)

    def below(self, vertex: str, indent: str) -> Iterator[str]:
        for link in self.down.get(vertex, ()):
            child = link.dst
            if child in self.seen:
                continue
            self.seen.add(child)
            if isinstance(child, int):
                yield from self.gpu(child, link.bandwidth, indent, link)
            elif link.kind == "network":
                yield from self.nic(child, link, indent)
            else:
                yield f"{indent}<pci {self.slot(next(self.free), '0x060400', link.bandwidth)}>"
                yield from self.below(child, indent + "  ")
                yield f"{indent}</pci>"

    def slot(self, bus: str, class_: str, bandwidth: int) -> str:
        speed, width = speeds.pcie_as_written(bandwidth)
        return f'busid="{bus}" class="{class_}" link_speed="{speed}" link_width="{width}"'

    def gpu(self, g: int, bandwidth: int, indent: str, link: Link | None = None) -> Iterator[str]:
        self.seen.add(g)
        nvlinks = [k for k in self.topology.links if k.src == g and k.kind == "nvlink"]
        sm = self.devices[g].sm or speeds.generation(max((k.bandwidth for k in nvlinks), default=0))
        yield f"{indent}<pci {self.slot(self.bus[g], '0x030200', bandwidth)}>"
        yield f'{indent}  <gpu dev="{g}" sm="{sm}" rank="{g}" gdr="1">'
        for k in nvlinks:
            if isinstance(k.dst, int):
                target, class_ = self.bus[k.dst], "0x030200"
            else:
                target, class_ = _HIDDEN, _CPU_CLASS if k.dst in self.cpus else _SWITCH_CLASS
            yield f'{indent}    <nvlink target="{target}" count="{k.count}" tclass="{class_}"/>'
        if link and (
            link.count > 1 or speeds.pcie(*speeds.pcie_as_written(bandwidth)) != bandwidth
        ):
            yield f'{indent}    <c2c bw="{bandwidth // 10**6}" count="{link.count}"/>'
        yield f"{indent}  </gpu>"
        yield f"{indent}</pci>"

    def nic(self, name: str, link: Link, indent: str) -> Iterator[str]:
        port = self.slot(next(self.free), "0x020000", max(link.bandwidth, speeds.PCIE))
        yield f"{indent}<pci {port}>"
        dev = sum(isinstance(v, str) and v not in self.cpus for v in self.seen)
        yield f"{indent}  <nic>"
        yield (
            f'{indent}    <net name={quoteattr(name)} dev="{dev}" latency="0" '
            f'speed="{link.bandwidth * 8 // 10**6}" port="1" guid="0x{dev:x}" maxconn="128" '
            'gdr="1"/>'
        )
        yield f"{indent}  </nic>"
        yield f"{indent}</pci>"


def _cpus(topology: Topology) -> list[str]:
    """The vertices that are CPUs: what sockets join, and what a "host" link leads to."""
    ends = {k.src for k in topology.links if k.kind == "socket"}
    pcie = {v for k in topology.links if k.kind == "pcie" for v in (k.src, k.dst)}
    ends |= {k.dst for k in topology.links if k.kind == "host"} - pcie
    return [v for v in dict.fromkeys(k.src for k in topology.links) if v in ends
            and isinstance(v, str)]  # fmt: skip
