"""Read NCCL's topology files: what NCCL_TOPO_DUMP_FILE writes.

The schema is that of NCCL's src/graph/xml.cc and topo.cc, version 1: `system` holds `cpu` (one a
NUMA node), which holds `pci` bridges and devices, which hold `gpu` (with `nvlink` and `c2c`) or
`nic` (with `net`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from xml.parsers import expat

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Link, Vertex
from linkweave.topology.machines import SWITCH_PLANES, both, ordered, switches_of_nvls
from linkweave.topology.topology import Topology

_GPU_CLASS, _CPU_CLASS = "0x03", "0x068001"
_MOST_COUNT = 1 << 30
_MOST = {"cpu": 64, "gpu": 1024, "net": 4096}


def parse_nccl_xml(text: str, name: str = "NCCL topology", gpu: str = "") -> Topology:
    """The machine of an NCCL topology file. GPU numbers are the file's `dev`, in their order.

    `gpu` is the model of GPUs whose compute capability the file does not tell. Raises
    TopologyError, with the line, for a file of another kind, without GPUs, or whose NVLinks
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
    made = _Reader(name, speeds.compute_capability(gpu)).read(root)
    apart = len(made.gpus) > 1 and speeds.without_peers(gpu)
    return replace(made, assumptions=(*made.assumptions, *[speeds.PEERS] * apart))


@dataclass
class _Gpu:
    element: Element
    device: GpuId
    at: str  # its CPU


@dataclass
class _Reader:
    name: str
    default_sm: int
    links: dict[tuple[Vertex, Vertex], Link] = field(default_factory=dict)
    gpus: list[_Gpu] = field(default_factory=list)
    names: Counter[str] = field(default_factory=lambda: Counter({"nvswitch": 1}))
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

    def add(self, links: Sequence[Link]) -> None:
        """Add links; a chip-to-chip link replaces the PCIe link between the same ends."""
        self.links |= {(link.src, link.dst): link for link in links}

    def text(self, element: Element, key: str) -> str:
        if not (value := element.attributes.get(key, "")):
            raise self.fail(element, f"needs {key}")
        return value

    def read(self, root: Element) -> Topology:
        if not any(e.tag == "gpu" for e in root.walk()):
            slots = sum(
                e.tag == "pci" and e.attributes.get("class", "").startswith(_GPU_CLASS)
                for e in root.walk()
            )
            hint = f"it has {slots} slots for GPUs, which NCCL fills in on the machine: " * (
                slots > 0
            )
            raise TopologyError(
                f"{self.name} has no <gpu> elements: {hint}dump the whole topology there with "
                "NCCL_TOPO_DUMP_FILE"
            )
        tags = Counter(e.tag for e in root.walk())
        for tag, most in _MOST.items():
            if tags[tag] > most:
                raise TopologyError(f"{self.name}: {tags[tag]} <{tag}> elements; at most {most}")
        cpus = list(root.all("cpu"))
        if len({cpu.attributes.get("host_hash") for cpu in cpus}) > 1:
            raise TopologyError(f"{self.name} is of several hosts: give one host's, as a node")
        named = []
        for cpu in cpus:
            at = f"cpu{self.number(cpu, 'numaid')}"
            if at in named:
                raise self.fail(cpu, f"comes twice with numaid {at[3:]}")
            named.append(at)
        self.names.update(dict.fromkeys(named, 1))
        for cpu, self.cpu in zip(cpus, named, strict=True):
            self.below(cpu, self.cpu, "host")
        rate = [self.socket(cpu) for cpu in cpus]
        for (a, x), (b, y) in combinations(zip(named, rate, strict=True), 2):
            assumed = any(told.startswith("unknown CPU") for told in self.assumed)
            self.add(both(a, b, min(x, y), kind="socket", assumed=assumed))
        self.gpus.sort(key=lambda gpu: gpu.device.gpu)
        for one, gpu in pairwise(self.gpus):
            if one.device.gpu == gpu.device.gpu:
                raise self.fail(gpu.element, f"comes twice with dev {gpu.device.gpu}")
        self.nvlinks()
        return self.machine()

    def machine(self) -> Topology:
        """Build the topology. As in NCCL, GPUs without a rank only forward if others have one."""
        numbers = [gpu.device.gpu for gpu in self.gpus]
        ranked = [g.device.gpu for g in self.gpus if "rank" in g.element.attributes] or numbers
        passing = tuple(g for g in numbers if g not in ranked)
        links = ordered(self.links.values())
        reducing = switches_of_nvls(links, [gpu.device for gpu in self.gpus])
        return Topology(
            self.name, tuple(ranked), links, tuple(dict.fromkeys(self.assumed)),
            tuple(g.device for g in self.gpus), passing, (), reducing,
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
        unknown = bandwidth is None or bandwidth <= 0
        if bandwidth is None or bandwidth <= 0:
            bandwidth = speeds.PCIE
            self.assumed.append(
                f"PCIe speed {pci.attributes.get('link_speed', '')!r} is not known: "
                f"{speeds.PCIE / 1e9:g} GB/s"
            )
        for gpu in gpus:
            dev = self.number(gpu, "dev")
            sm = self.number(gpu, "sm", self.default_sm or None) or self.default_sm
            if dev < 0 or sm < 0:
                raise self.fail(gpu, f"has dev {dev} and sm {sm}; neither can be negative")
            found = GpuId(dev, bus_id if len(gpus) == 1 else "", sm=sm)
            self.gpus.append(_Gpu(gpu, found, self.cpu))
            self.add(both(found.gpu, at, bandwidth, kind=kind, assumed=unknown))
        for nic in nics:
            self.nets(nic, at, bandwidth)
        if not gpus and not nics:
            switch = self.fresh(f"switch{self.switches}")
            self.switches += 1
            self.add(both(switch, at, bandwidth, kind=kind, assumed=unknown))
            self.below(pci, switch, "pcie")

    def nets(self, nic: Element, at: str, port: int | None) -> None:
        """Read a NIC's ports. Each is as fast as the slower of its network and its PCIe link."""
        for net in nic.all("net"):
            mbps = self.number(net, "speed", 0)
            speed = mbps * 10**6 // 8 if mbps > 0 else speeds.NETWORK
            if mbps <= 0:
                self.assumed.append(f"speed of the NICs not told: {speed / 1e9:g} GB/s each")
            name = self.fresh(net.attributes.get("name") or f"net{self.number(net, 'dev', 0)}")
            bandwidth = min(speed, port or speed)
            self.add(both(name, at, bandwidth, kind="network", assumed=mbps <= 0))

    def fresh(self, wanted: str) -> str:
        """Return a vertex name that is not taken."""
        name = wanted
        while self.names[name]:
            self.names[wanted] += 1
            name = f"{wanted}.{self.names[wanted]}"
        self.names[name] += 1
        return name

    def nvlinks(self) -> None:
        """Read NVLinks to GPUs, NVSwitches (as one switch) and CPUs, and chip-to-chip links."""
        by_bus: dict[str, int] = {}
        for gpu in self.gpus:
            if (bus := gpu.device.bus_id) and by_bus.setdefault(bus, gpu.device.gpu) != (
                gpu.device.gpu
            ):
                raise self.fail(gpu.element, f"shares busid {bus} with GPU {by_bus[bus]}")
        rate = {gpu.device.gpu: speeds.nvlink(gpu.device.sm) for gpu in self.gpus}
        unknown = {gpu.device.gpu for gpu in self.gpus if not gpu.device.sm}
        if unknown and any(list(gpu.element.all("nvlink")) for gpu in self.gpus):
            self.assumed.append(
                f"GPU model not told: NVLinks taken as {speeds.NVLINK / 1e9:g} GB/s"
            )
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
            if counts["nvswitch"]:
                self.assumed.append(SWITCH_PLANES)
            for to, n in counts.items():
                end = gpu.at if to == "cpu" else to
                self.add(both(me, end, rate[me], n, assumed=me in unknown))
            for link in gpu.element.all("c2c"):
                each, n = self.number(link, "bw") * 10**6, self.number(link, "count")
                if each <= 0 or n <= 0:
                    raise self.fail(link, f"has bw {each // 10**6} and count {n}")
                self.add(both(me, gpu.at, each, n, kind="host"))
        for (a, b), (n, element) in direct.items():
            back = direct.get((b, a), (0, element))[0]
            if n != back:
                raise self.fail(
                    element, f"joins GPU {a} to GPU {b} by {n} NVLinks, but back there are {back}"
                )
            if a < b:
                self.add(both(a, b, min(rate[a], rate[b]), n, assumed=bool(unknown & {a, b})))


DEEPEST = 64
MOST_ELEMENTS = 50_000
MOST_ATTRIBUTES = 64
LONGEST_VALUE = 255  # as in NCCL


@dataclass
class Element:
    """An element: tag, attributes, line in the text, and children."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> Iterator[Element]:
        return (child for child in self.children if child.tag == tag)

    def walk(self) -> Iterator[Element]:
        todo = [self]
        while todo:
            element = todo.pop()
            yield element
            todo += reversed(element.children)


def parse_xml(text: str, name: str) -> Element:
    """The root element. Raises TopologyError, with line and column, for anything but plain XML."""
    parser = expat.ParserCreate("utf-8")  # whatever the text says it was
    roots: list[Element] = []
    stack: list[Element] = []
    count = 0

    def fail(what: str) -> None:
        position = f"line {parser.CurrentLineNumber} column {parser.CurrentColumnNumber + 1}"
        raise TopologyError(f"{name}: {position}: {what}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) >= DEEPEST:
            fail(f"elements lie more than {DEEPEST} deep")
        if count > MOST_ELEMENTS:
            fail(f"more than {MOST_ELEMENTS} elements")
        if len(attributes) > MOST_ATTRIBUTES:
            fail(f"an element with {len(attributes)} attributes; at most {MOST_ATTRIBUTES}")
        for key, value in attributes.items():
            if max(len(key), len(value)) > LONGEST_VALUE:
                fail(f"an attribute of more than {LONGEST_VALUE} characters: {key[:40]}")
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def doctype(*_: object) -> None:
        fail("a document type (DTD) is not allowed here")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as error:
        raise TopologyError(
            f"{name}: line {error.lineno} column {error.offset + 1}: not well-formed XML: "
            f"{expat.ErrorString(error.code)}"
        ) from None
    return roots[0]
