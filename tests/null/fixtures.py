"""What machines' tools print, rebuilt from the facts of real outputs, oddities and all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle, permutations
from types import SimpleNamespace
from typing import Any

from linkweave.topology import Topology

Counts = Mapping[tuple[int, int], int]
"""NVLinks by pair of GPUs, the lesser number first."""


def counts(rows: str) -> Counts:
    """NVLinks from rows like "X12 1X. 2.X": digits, or a point where there is none."""
    table = rows.split()
    return {
        (a, b): int(table[a][b])
        for a, b in combinations(range(len(table)), 2)
        if table[a][b] != "."
    }


def all_to_all(n: int, count: int) -> Counts:
    return dict.fromkeys(combinations(range(n), 2), count)


@dataclass(frozen=True)
class Machine:
    """Facts of a matrix. `positions`: the CPU of each GPU and NIC, then its switch if any."""

    nvlinks: Counts
    positions: str
    nics: Sequence[str] = ()
    near: str = "NODE"  # how smi calls the way within a CPU
    far: str = "SYS"
    tails: Sequence[str] = field(default_factory=list)  # of the rows, what follows the cells

    @property
    def labels(self) -> list[str]:
        gpus = len(self.positions.split()) - len(self.nics)
        return [*(f"GPU{g}" for g in range(gpus)), *self.nics]

    def cell(self, a: int, b: int) -> str:
        if a == b:
            return " X "
        if n := self.nvlinks.get((min(a, b), max(a, b))):
            return f"NV{n}"
        one, other = (self.positions.split()[i] for i in (a, b))
        if one == other and len(one) > 1:
            return "PIX"
        return self.near if one[0] == other[0] else self.far

    def rows(self) -> list[list[str]]:
        every = range(len(self.labels))
        return [[self.cell(a, b) for b in every] for a in every]


AFFINITIES = "\tCPU Affinity\tNUMA Affinity"


LEGEND = """
Legend:

  X    = Self
  SYS  = Connection over PCIe and the interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection over PCIe and the interconnect between Host Bridges within a NUMA node
  PHB  = Connection over PCIe and a PCIe Host Bridge (typically the CPU)
  PIX  = Connection over at most a single PCIe bridge
  NV#  = Connection over a bonded set of # NVLinks
"""
OLD_LEGEND = """

Legend:

  X   = Self
  SOC  = Connection over PCIe and the SMP link between CPU sockets(e.g. QPI)
  PIX  = Connection over a single PCIe switch
  NV# """


def tabs(machine: Machine, header: str = AFFINITIES) -> str:
    """As nvidia-smi prints it."""
    lines = ["\t" + "\t".join(machine.labels) + header]
    for label, row, tail in zip(machine.labels, machine.rows(), machine.tails, strict=True):
        lines.append("\t".join([label, *row]) + tail)
    return "\n".join(lines) + "\n"


def blanks(text: str) -> str:
    """Tabs turned into blanks by a terminal."""
    return "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines()) + "\n"


def prefixed(text: str, prefix: str) -> str:
    """Every line behind a prefix; the header's own indent is lost."""
    return "\n".join(prefix + line for line in text.lstrip().split("\n"))


def glued(machine: Machine) -> str:
    """The header that drivers of 2016 printed, no white space between GPUs; the old legend, cut."""
    lines = tabs(machine, header="\tCPU Affinity").splitlines()
    gpus = "".join(label for label in machine.labels if label.startswith("GPU"))
    lines[0] = f"\t    {gpus}" + "\t".join([*machine.nics, "CPU Affinity"])
    lines[-1] = lines[-1].rstrip()
    return "\n".join(lines) + OLD_LEGEND


def mixed(machine: Machine) -> str:
    """Realigned by hand: tabs and blanks in turn, one or several."""
    gaps = cycle(("\t", " \t", "\t\t", "\t    ", "\t ", "\t \t", "\t\t"))
    lines = ["\t\t" + "\t".join(machine.labels) + "\tCPU Affinity    NUMA Affinity"]
    for label, row, tail in zip(machine.labels, machine.rows(), machine.tails, strict=True):
        line = label
        for cell in row:
            line += next(gaps) + cell.strip()
        lines.append(line + tail)
    return "\n".join(lines) + "\n"


def coloured(text: str) -> str:
    """With the escapes that underline the header on a terminal, and a reset after every row."""
    first, *rest = text.lstrip("\t").split("\n")
    rows = [f"\x1b[1;32m{row}\x1b[m" if row else "" for row in rest]
    return "\n".join([f"\t\x1b[4m{first}\x1b[0m", *rows])


_CUBE_MESH = counts("X1122... 1X21.2.. 12X2..1. 212X...1 2...X112 .2..1X21 ..1.12X2 ...1212X")
_RENUMBERED = counts("X121...2 1X12..2. 21X2.1.. 122X1... ...1X221 ..1.2X12 .2..21X1 2...121X")
_SWITCHES = "0a 0a 0b 0b 1c 1c 1d 1d"


def _split(first: str, second: str, each: int = 4) -> list[str]:
    return [first] * each + [second] * each


MACHINES = {
    "dgx1-v100": Machine(
        _CUBE_MESH, f"{_SWITCHES} 0a 1c 0b 1d", ("mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"), "PHB",
        tails=[*_split("\t0-19,40-59", "\t20-39,60-79"), *["\t"] * 4],
    ),
    "dgx1-p100": Machine(
        dict.fromkeys(_CUBE_MESH, 1), f"{_SWITCHES} 0a 1c 0b 1d",
        ("mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"), "PHB", "SOC",
        tails=[*["\t1-1"] * 8, *[""] * 4],
    ),
    "commented": Machine(
        _CUBE_MESH, f"{_SWITCHES} 1 0a 0a 0b 0b 1c 1c 1d 1d",
        ("mlx4_0", *(f"mlx5_{i}" for i in range(8))),
        tails=[*_split("\t0-19,40-59\t0", "\t20-39,60-79\t1"), *[""] * 9],
    ),
    "mixed": Machine(
        _RENUMBERED, "0 0 0a 0a 1 1 1b 1b 0a 1b", ("mlx5_0", "mlx5_1"),
        tails=[*_split("\t\t0-23,48-71\t\t0", "\t24-47,72-95\t\t1"), *["\t\t"] * 2],
    ),
    "vm": Machine(_CUBE_MESH, "0 " * 8, near="PHB", tails=["\t0-63\t0-1"] * 8),
    "h100": Machine(
        all_to_all(8, 18), "0 0 0 0 1 1 1 1 2", ("NIC0",),
        tails=[*_split("\t0-103\t0\t\tN/A", "\t104-207\t1\t\tN/A"), "\t\t\t\t"],
    ),
    "pairs": Machine(
        {(0, 1): 12, (2, 3): 12, (4, 5): 12, (6, 7): 12}, "0 0 0 0 1 1 1 1",
        tails=_split("\t0-31,64-95\t0", "\t32-63,96-127\t1"),
    ),
    "quad": Machine(
        all_to_all(4, 2), "0 0 0 0 0", ("mlx5_0",), tails=[*["\t0,2,4,6,8,10\t0"] * 4, "\t\t"]
    ),
    "cloud": Machine(counts("X112 1X21 12X2 212X"), "0 0 0 0", tails=["\t0-31\t\tN/A"] * 4),
    "desktop": Machine({}, "0 0", near="PHB", tails=["\t0-63\t0\t\tN/A"] * 2),
}  # fmt: skip
_WITH_ID = f"{AFFINITIES}\tGPU NUMA ID"

SMI = {
    "dgx1-v100": tabs(MACHINES["dgx1-v100"], "\tCPU Affinity") + LEGEND,
    "dgx1-p100": glued(MACHINES["dgx1-p100"]),
    "commented": prefixed(blanks(tabs(MACHINES["commented"])).rstrip(), "#        "),
    "mixed": mixed(MACHINES["mixed"]) + LEGEND,
    "vm": tabs(MACHINES["vm"]) + LEGEND,
    "h100": prefixed(tabs(MACHINES["h100"], _WITH_ID) + LEGEND, "    "),
    "pairs": blanks(tabs(MACHINES["pairs"])),
    "quad": tabs(MACHINES["quad"]) + LEGEND,
    "cloud": tabs(MACHINES["cloud"]) + LEGEND,
    "desktop": tabs(MACHINES["desktop"], _WITH_ID) + LEGEND,
}
"""`nvidia-smi topo -m` of each machine above, as people pasted it."""


def listed(model: str, gpus: int, mig: int = 0) -> str:
    """`nvidia-smi -L`, with so many MIG devices on the last GPU."""
    lines = [f"GPU {g}: {model} (UUID: {uuid(g)})" for g in range(gpus)]
    lines += [f"  MIG 1g.5gb      Device  {i}: (UUID: MIG-{uuid(i)[4:]})" for i in range(mig)]
    return "\n".join(lines) + "\n"


def uuid(gpu: int) -> str:
    return f"GPU-1c8e3f6a-0b1d-4e2f-9a3b-{gpu:012x}"


# ---- NCCL's topology files ---------------------------------------------------------------------


def pci(bus: str, class_: str, inside: str = "", speed: str = "8 GT/s", width: int = 16) -> str:
    head = f'<pci busid="{bus}" class="{class_}" link_speed="{speed}" link_width="{width}"'
    return f"{head}>\n{inside}</pci>\n" if inside else f"{head}/>\n"


def gpu(dev: int, sm: int, inside: str) -> str:
    return f'<gpu dev="{dev}" sm="{sm}" rank="{dev}" gdr="1">\n{inside}</gpu>\n'


def nvlink(target: str, count: int, class_: str = "0x030200") -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="{class_}"/>\n'


def net(name: str, dev: int, mbps: int) -> str:
    return (
        f'<net name="{name}" dev="{dev}" speed="{mbps}" port="0" latency="0.000000" '
        f'guid="0x{dev}" maxconn="65536" gdr="0"/>\n'
    )


def cpu(numa: int, inside: str, attributes: str = "") -> str:
    xeon = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"'
    return f'<cpu numaid="{numa}" affinity="0000ffff" {attributes or xeon}>\n{inside}</cpu>\n'


def system(*cpus: str) -> str:
    return f'<system version="1">\n{"".join(cpus)}</system>\n'


def _of(g: int, nvlinks: Counts) -> dict[int, int]:
    """The GPUs that GPU g has NVLinks to."""
    return {b if a == g else a: n for (a, b), n in nvlinks.items() if g in (a, b)}


def _bus(number: str) -> str:
    return f"0000:{number}:00.0"


def _dgx1_dump() -> str:
    bus = [_bus(n) for n in ("06", "07", "0a", "0b", "85", "86", "89", "8a")]

    def switch(at: str, gpus: Sequence[int]) -> str:
        inside = ""
        for g in gpus:
            links = "".join(nvlink(bus[to], n) for to, n in _of(g, _CUBE_MESH).items())
            inside += pci(bus[g], "0x030200", gpu(g, 70, links))
        return pci(_bus(at), "0x060400", inside)

    ethernet = f"<nic>\n{net('enp1s0f0', 0, 1000)}</nic>\n"
    bridges = net("lxcbr0", 1, 10000) + net("br-d774142ed332", 2, 10000)
    return system(
        cpu(0, switch("03", (0, 1)) + switch("08", (2, 3))
            + pci(_bus("01"), "0x020000", ethernet, "5 GT/s", 8) + f"<nic>\n{bridges}</nic>\n"),
        cpu(1, switch("82", (4, 5)) + switch("87", (6, 7))),
    )  # fmt: skip


def _a100_dump() -> str:
    """NUMA nodes 3, 0, 1 and 2 have GPUs 0, 3, 2 and 1."""
    bus = [_bus(n) for n in ("03", "41", "82", "c1")]
    speed = "16.0 GT/s PCIe"
    cpus = []
    for numa, g, at in ((3, 0, "01"), (0, 3, "c2"), (1, 2, "81"), (2, 1, "42")):
        links = "".join(nvlink(bus[to], 4) for to in (2, 3, 1, 0) if to != g)
        nic = f"<nic>\n{net(f'cxi{numa}', numa, 200000)}</nic>\n"
        inside = pci(_bus(at), "0x020000", nic, speed)
        inside += pci(bus[g], "0x030200", gpu(g, 80, links), speed)
        epyc = 'host_hash="0x94ecb6d613fd2af1" arch="x86_64" vendor="AuthenticAMD" '
        cpus.append(cpu(numa, inside, f'{epyc} familyid="175" modelid="1"'))
    return system(*cpus)


def _vendor_file(speed: str, comment: str = "") -> str:
    """Places of 8 GPUs, two to a switch with their NIC, as clouds ship it for their machines."""
    cpus = []
    for numa in range(2):
        inside = "".join(
            pci(f"ffff:ff:0{2 * numa + s + 1}.0", "0x060400", "".join(
                pci(f"000{4 * numa + 2 * s + i}:00:00.0", class_, speed=speed)
                for i, class_ in enumerate(("0x030200", "0x030200", "0x020000"))
            ), speed)
            for s in range(2)
        )  # fmt: skip
        cpus.append(cpu(numa, inside))
    return comment + system(*cpus)


DUMPS = {"dgx1-v100": _dgx1_dump(), "a100x4": _a100_dump()}
"""Whole machines, as NCCL_TOPO_DUMP_FILE has them."""

VENDOR_FILES = {
    "azure": _vendor_file("16 GT/s"),
    "aws": _vendor_file("8 GT/s", "<!--\nStatic topology of an instance type.\n-->\n"),
}

GRAPH_FILE = """<graphs version="1">
  <graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="21" speedinter="21">
    <channel>
      <gpu dev="0"/>
      <gpu dev="1"/>
    </channel>
  </graph>
</graphs>
"""


# ---- measured figures ----------------------------------------------------------------------------


def p2p_matrix(title: str, rows: str, corner: str = "D\\D") -> str:
    table = [row.split() for row in rows.strip().splitlines()]
    head = f"   {corner}" + "".join(f"{g:6} " for g in range(len(table)))
    lines = [f"{g:6} " + " ".join(f"{c:>6}" for c in row) for g, row in enumerate(table)]
    return "\n".join([*([title] if title else []), head.rstrip(), *lines]) + "\n"


P2P_BANDWIDTH = """
    734.95  48.34  24.22   9.79
     48.36 746.14   9.75  48.20
     24.10   9.67 746.09  38.30
      9.44  48.00  47.50 748.73
"""
P2P_LATENCY = """
      1.98   2.24   2.22   2.73
      2.27   1.99   2.77   2.28
      1.81   2.72   1.90   1.80
      2.74   2.23   2.20   1.97
"""
P2P = (
    "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n"
    "Device: 0, Tesla V100-SXM2-16GB, pciBusID: 1, pciDeviceID: 0, pciDomainID:0\n"
    "\nP2P Connectivity Matrix\n"
    + p2p_matrix("", "1 1 1 1\n" * 4)
    + p2p_matrix("Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)", """
        737.33   9.80  11.03  11.02
          9.83 746.45  11.02  11.02
         11.09  11.04 743.78   9.84
         11.10  11.07   9.85 746.49
    """)
    + p2p_matrix("Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)", P2P_BANDWIDTH)
    + p2p_matrix("Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)", """
        747.83  96.39  48.36  18.61
         96.41 745.60  18.39  96.43
         48.37  18.82 750.84  79.61
         18.82  96.21  78.99 752.13
    """)
    + p2p_matrix("P2P=Disabled Latency Matrix (us)", """
          1.99  18.43  17.49  17.67
         18.49   2.00  18.47  18.47
         18.45  18.46   1.90  18.46
         17.71  17.42  17.50   1.95
    """, "GPU")
    + p2p_matrix("P2P=Enabled Latency (P2P Writes) Matrix (us)", P2P_LATENCY, "GPU")
    + "\n" + p2p_matrix("", """
          3.53   2.47   2.47   2.47
          2.39   3.48   2.40   2.36
          2.31   2.29   3.44   2.28
          2.34   2.44   2.47   3.45
    """, "CPU")
)  # fmt: skip
"""p2pBandwidthLatencyTest on four V100, of which 0 and 3, and 1 and 2, have no NVLinks."""

NCCL_TESTS = """# nccl-tests all_reduce_perf, 8 GPUs
#       size         count    type   redop     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)
   134217728      33554432   float     sum   1818.8   73.80  129.14  2e-07
"""


# ---- NVML ---------------------------------------------------------------------------------------

LEVEL = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class DriverError(Exception):
    """NVML's error: a number in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Driver:
    """The functions of NVML that a look at the machine needs, over a machine's description.

    Device i of the driver is GPU `order[i]` of the machine. `shut` counts the shutdowns.
    """

    NVMLError = DriverError
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED = 2, 3
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13

    def __init__(
        self, machine: Topology, order: Sequence[int] | None = None, sm: tuple[int, int] = (7, 0),
        model: str = "Tesla V100-SXM2-16GB", hidden: Sequence[int] = (), **fails: int,
    ) -> None:  # fmt: skip
        """`hidden` GPUs are wired, but this process is not given them. A function of NVML that is
        named in `fails` ends with that error."""
        self.order = list(machine.gpus if order is None else order)
        self.seen = [g for g in self.order if g not in hidden]
        self.sm, self.model, self.hidden = sm, model, set(hidden)
        plain = replace(machine, links=tuple(k for k in machine.links if k.kind != "nvlink"))
        self.far = {e: plain.cell(*e) for e in permutations(machine.gpus, 2)}
        self.remotes = {
            g: [k.dst for k in machine.links if k.src == g and k.kind == "nvlink"
                for _ in range(k.count)]
            for g in machine.gpus
        }  # fmt: skip
        self.mig: dict[int, tuple[int, int]] = {}
        self.instances: dict[str, int] = {}  # names of MIG instances
        self.off: set[tuple[int, int]] = set()
        self.fails = fails
        self.nowhere: str | bytes = ""
        self.started = self.shut = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and (value := self.fails.get(name)) is not None:

            def fail(*_: object) -> None:
                raise DriverError(value)

            return fail
        return super().__getattribute__(name)

    def bus(self, gpu: int) -> str:
        return f"00000000:{0x06 + 0x11 * self.order.index(gpu):02X}:00.0"

    def uuid(self, gpu: int) -> str:
        return f"GPU-{'abcdefghijklmnop'[gpu]}0{gpu}-11"

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.seen)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return self.seen[i]

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return self.sm

    def nvmlDeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.bus(gpu))

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return self.uuid(gpu)

    def nvmlDeviceGetName(self, gpu: int) -> bytes:
        return self.model.encode()  # older bindings give bytes

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if not self.remotes[gpu]:
            raise DriverError(self.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(self.remotes[gpu]):
            raise DriverError(self.NVML_ERROR_INVALID_ARGUMENT)
        return 0 if (gpu, link) in self.off else 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if isinstance(self.remotes[gpu][link], str) else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:
        remote = self.remotes[gpu][link]
        if isinstance(remote, str):
            return SimpleNamespace(busId="00000000:C0:00.0")
        return SimpleNamespace(busId=self.nowhere if remote in self.hidden else self.bus(remote))

    def nvmlDeviceGetMigMode(self, gpu: int) -> tuple[int, int]:
        if gpu not in self.mig:
            raise DriverError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.mig[gpu]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.instances:
            raise DriverError(6)  # not found
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: str) -> int:
        return self.instances[instance]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, two: int) -> int:
        return LEVEL[self.far[one, two]]


# ---- the same facts of a topology that was read --------------------------------------------------


def nvlinks_of(topology: Topology) -> Counts:
    """NVLinks by pair of GPUs; both ways must be equal."""
    found = {(k.src, k.dst): k for k in topology.links if k.kind == "nvlink"}
    for (a, b), link in found.items():
        assert (found[b, a].count, found[b, a].bandwidth) == (link.count, link.bandwidth)
    direct = [(a, b) for a, b in found if isinstance(a, int) and isinstance(b, int) and a < b]
    return {ends: found[ends].count for ends in direct}


def ports_of(topology: Topology) -> dict[int, int]:
    """NVLinks of each GPU into the NVSwitch."""
    links = [k for k in topology.links if k.kind == "nvlink" and k.dst == "nvswitch"]
    return {k.src: k.count for k in links}


def tree_of(topology: Topology) -> set[tuple[str, str, str]]:
    """PCIe: (device or switch, what it hangs under, kind); both ways must be there."""
    found = {(str(k.src), str(k.dst), k.kind) for k in topology.links if k.kind != "nvlink"}
    assert found == {(b, a, kind) for a, b, kind in found}
    return found


def drawn(text: str) -> set[tuple[str, str, str]]:
    """The same of "switch0: 0 1 mlx5_0 | cpu0: switch0", the last word's kind by the names."""
    found = set()
    for part in text.split(" | "):
        parent, _, children = part.partition(": ")
        for child in children.split():
            kind = "host" if parent.startswith("cpu") else "pcie"
            kind = "network" if child.startswith(("mlx", "NIC")) else kind
            kind = "socket" if child.startswith("cpu") else kind
            found |= {(child, parent, kind), (parent, child, kind)}
    return found
