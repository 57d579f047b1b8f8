"""Build a machine from facts about pairs of devices, as nvidia-smi and NVML tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Link, Vertex, groups
from linkweave.topology.machines import both, dgx1_p100, ordered, switches_of_nvls
from linkweave.topology.topology import Topology

Pair = tuple[Vertex, Vertex]

PIX, PXB, PHB, NODE, SYS = range(1, 6)
"""PCIe distance of two devices: one switch, several, a host bridge, several, several CPUs."""


@dataclass
class Told:
    """What nvidia-smi or NVML says. GPUs are ints and NICs strings; each pair is given once.

    `level` lacks pairs that NVLinks join, because nvidia-smi then does not show it. `numa` (NUMA
    nodes or CPU lists) and `ports` (the number of NVLinks into a switch) may lack GPUs. If NUMA
    nodes are numbers, CPUs are named after them.
    """

    name: str
    devices: Sequence[GpuId]
    nics: Sequence[str] = ()
    nvlinks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    level: Mapping[Pair, int] = field(default_factory=dict)
    numa: Mapping[int, str] = field(default_factory=dict)
    ports: Mapping[int, int] = field(default_factory=dict)
    assumptions: Sequence[str] = ()


def assemble(told: Told) -> Topology:
    """Build the machine: NVLinks, NVSwitch, and a PCIe tree that agrees with the levels.

    PHB and NODE are treated alike: both cross one CPU. Raises TopologyError if NVLinks contradict
    each other.
    """
    assumed = list(told.assumptions)
    sm = {d.gpu: d.sm for d in told.devices}
    links = _nvlinks(told, sm, assumed)
    links += _pcie_tree(told, sm, assumed)
    gpus = tuple(d.gpu for d in told.devices)
    every = ordered(links)
    machine = Topology(
        told.name, gpus, every, tuple(assumed), tuple(told.devices),
        reducing=switches_of_nvls(every, told.devices),
    )  # fmt: skip
    if any(sm.values()):
        return machine
    return _without_models(machine)


def _without_models(machine: Topology) -> Topology:
    """Note the assumed speeds. A machine wired like a DGX-1 with P100 gets that one's."""
    nvlinks = [k for k in machine.links if k.kind == "nvlink"]
    pcie = f"PCIe ports as {speeds.PCIE / 1e9:g} GB/s (generation 3)"
    if not nvlinks:
        return replace(machine, assumptions=(*machine.assumptions, f"GPU model not told: {pcie}"))
    p100 = dgx1_p100()
    slow = p100.fabric[0].bandwidth
    slower = tuple(replace(k, bandwidth=slow) if k.kind == "nvlink" else k for k in machine.links)
    if len(nvlinks) == len(p100.fabric) and all(k.count == 1 for k in nvlinks):
        as_p100 = replace(machine, links=slower, assumptions=(
            *machine.assumptions,
            f"GPU model not told: wired as a DGX-1 with P100, so NVLinks are taken as "
            f"{slow / 1e9:g} GB/s each way (NVLink 1), {pcie}",
        ))  # fmt: skip
        if as_p100.isomorphic_to(p100):
            return as_p100
    return replace(machine, assumptions=(
        *machine.assumptions,
        f"GPU model not told: NVLinks taken as {speeds.NVLINK / 1e9:g} GB/s each way "
        f"(NVLink 2 to 4), {pcie}",
    ))  # fmt: skip


def _nvlinks(told: Told, sm: Mapping[int, int], assumed: list[str]) -> list[Link]:
    def rate(gpu: int) -> int:
        return speeds.nvlink(sm[gpu])

    links: list[Link] = []
    ports = dict(told.ports)
    for group in groups(sm, [pair for pair, n in told.nvlinks.items() if n]):
        counts = {p: n for p, n in told.nvlinks.items() if p[0] in group and n}
        degree = {g: sum(n for p, n in counts.items() if g in p) for g in group}
        busiest = max(group, key=lambda g: degree[g])
        if degree[busiest] <= speeds.MOST_NVLINKS:
            for (a, b), n in counts.items():
                links += both(a, b, min(rate(a), rate(b)), n, assumed=not (sm[a] and sm[b]))
            continue
        own = {g: max(n for p, n in counts.items() if g in p) for g in group}
        for a, b in combinations(group, 2):
            n = counts.get((a, b), counts.get((b, a), 0))
            if n != min(own[a], own[b]):
                raise TopologyError(
                    f"{told.name}: GPU {busiest} would have {degree[busiest]} NVLinks, but no GPU "
                    f"has more than {speeds.MOST_NVLINKS}, and an NVSwitch would join GPU {a} and "
                    f"GPU {b} by {min(own[a], own[b])}, not {n}"
                )
        ports.update(own)
        assumed.append(
            f"an NVSwitch joins GPUs {', '.join(map(str, group))}: as direct links GPU {busiest} "
            f"would have {degree[busiest]}"
        )
    for gpu, n in ports.items():
        links += both(gpu, "nvswitch", rate(gpu), n, assumed=not sm[gpu])
    return links


def _pcie_tree(told: Told, sm: Mapping[int, int], assumed: list[str]) -> list[Link]:
    devices: list[Vertex] = [*sm, *told.nics]
    level = _levels(told, devices, assumed)

    def within(most: int, members: Sequence[Vertex]) -> list[list[Vertex]]:
        inside = set(members)
        near = [p for p, far in level.items() if far <= most and inside.issuperset(p)]
        return groups(members, near)

    def port(vertex: Vertex) -> int:
        return speeds.pcie_port(sm[vertex]) if isinstance(vertex, int) else speeds.NETWORK

    links: list[Link] = []
    switches = 0

    def attach(members: Sequence[Vertex], to: str, most: int, kind: str) -> int:
        """Attach devices below a vertex, over the switches they share; return the widest port."""
        nonlocal switches
        widest = 0
        for group in within(most, members):
            if len(group) == 1:
                v = group[0]
                bandwidth, kind_ = port(v), kind if isinstance(v, int) else "network"
                unknown = not (isinstance(v, int) and sm[v])
                links.extend(both(v, to, bandwidth, kind=kind_, assumed=unknown))
                uplink = bandwidth if isinstance(v, int) else speeds.PCIE
            elif most > PIX and len(within(PIX, group)) == 1:
                uplink = attach(group, to, PIX, kind)
            else:
                switch = f"switch{switches}"
                switches += 1
                uplink = attach(group, switch, most - 1, "pcie")
                unknown = not any(sm.values())
                links.extend(both(switch, to, uplink, kind=kind, assumed=unknown))
            widest = max(widest, uplink)
        return widest

    cpus = within(NODE, devices)
    names = _cpu_names(cpus, told.numa)
    for v in (group[0] for group in cpus if not any(isinstance(v, int) for v in group)):
        assumed.append(f"{v} is near no GPU: drawn under a CPU of its own")
    if NODE in told.level.values():
        assumed.append("NODE (several bridges of one CPU) is drawn as one CPU, PHB")
    for name, members in zip(names, cpus, strict=True):
        attach(members, name, PXB, "host")
    for a, b in combinations(names, 2):
        links += both(a, b, speeds.SOCKETS, kind="socket", assumed=True)
    if len(names) > 1:
        assumed.append(f"CPU model not told: {speeds.SOCKETS / 1e9:g} GB/s between CPUs")
    if told.nics:
        assumed.append(f"speed of the NICs not told: {speeds.NETWORK / 1e9:g} GB/s each")
    return links


def _levels(told: Told, devices: Sequence[Vertex], assumed: list[str]) -> dict[Pair, int]:
    """Find the levels of all pairs, including those that NVLinks hide.

    PCIe is a tree, so two devices are no further apart than the larger of their distances to any
    third device. The known levels thus limit those of hidden pairs and of each other.
    """
    told_level = dict(told.level)
    between_gpus = [p for p in told.level if all(isinstance(v, int) for v in p)]
    alike = len(told.numa) == len(told.devices) and len({*told.numa.values()}) == 1
    parted = len(between_gpus) > 2 and {told.level[p] for p in between_gpus} == {SYS}
    if alike and parted and not told.nvlinks:
        told_level.update(dict.fromkeys(between_gpus, NODE))
        assumed.append("all GPUs have the same CPUs, so SYS between them is taken as NODE")
    nearest: dict[Pair, int] = {}
    for far in range(PIX, SYS + 1):
        for group in groups(devices, [p for p, level in told_level.items() if level <= far]):
            for pair in combinations(group, 2):
                nearest.setdefault(pair, far)
    told_level |= {(b, a): far for (a, b), far in told_level.items()}
    numa = told.numa
    if any(
        far == SYS and isinstance(a, int) and isinstance(b, int) and numa.get(a) == numa.get(b)
        for (a, b), far in told.level.items()
    ):
        numa = {}  # a job bound to a few CPUs sees all GPUs near them
    hidden, how = 0, set()
    open_pairs: set[Pair] = set()
    for a, b in combinations(devices, 2):
        if (a, b) in told_level:
            continue
        hidden += 1
        nodes = [numa.get(v, "") if isinstance(v, int) else "" for v in (a, b)]
        if nearest.get((a, b), SYS) < SYS:
            how.add("devices near them")
        elif all(nodes):
            nearest[a, b] = NODE if nodes[0] == nodes[1] else SYS
            how.add("their NUMA nodes and CPUs")
        else:
            open_pairs.add((a, b))
            how.add("nothing else, so on as few CPUs as the other pairs allow")
    _share_cpus(devices, nearest, open_pairs)
    if hidden:
        assumed.append(
            "PCIe between GPUs that NVLinks join is not told: inferred from "
            + (" and ".join(sorted(how)) or "other devices")
        )
    loose = [p for p, far in nearest.items() if told_level.get(p, far) > far]
    if loose:
        a, b = (f"GPU{v}" if isinstance(v, int) else v for v in loose[0])
        assumed.append(
            f"{len(loose)} pairs ({a}, {b}) are said to be further apart on PCIe than a third "
            "device allows: taken as nearer"
        )
    return nearest


def _share_cpus(devices: Sequence[Vertex], nearest: dict[Pair, int], open_pairs: set[Pair]) -> None:
    """Put devices with unknown distances on the same CPU unless other pairs are apart."""
    known = {pair: far for pair, far in nearest.items() if pair not in open_pairs}
    apart = {frozenset(pair) for pair, far in known.items() if far == SYS}
    cpus: list[list[Vertex]] = []
    for near in groups(devices, [pair for pair, far in known.items() if far <= NODE]):
        for cpu in cpus:
            if not any(frozenset((a, b)) in apart for a in cpu for b in near):
                cpu += near
                break
        else:
            cpus.append(near)
    at = {v: i for i, cpu in enumerate(cpus) for v in cpu}
    nearest.update({(a, b): NODE if at[a] == at[b] else SYS for a, b in open_pairs})


def _cpu_names(cpus: Sequence[Sequence[Vertex]], numa: Mapping[int, str]) -> list[str]:
    """Names of CPUs: by NUMA node if each CPU's GPUs have one of their own, else in order."""
    nodes = [{numa.get(v, "") for v in members if isinstance(v, int)} for members in cpus]
    told = [next(iter(n)) for n in nodes if len(n) == 1]
    if len(told) == len(cpus) == len(set(told)) and all(t.isdecimal() for t in told):
        return [f"cpu{int(t)}" for t in told]
    return [f"cpu{i}" for i in range(len(cpus))]
