"""Several nodes of one machine, joined by NICs.

In words, as `topology.load` reads them (what is not given has the default shown):

    16 x dgx-a100  nics=rail  nic=24GB/s  leaf=8  oversubscription=1  latency=5us

`nics=rail`: each GPU (or each PCIe switch with GPUs, or each NIC of a machine read from a file) has
its NIC, and the i-th NICs of all nodes share a switch of their own, a rail. `nics=1`: one
NIC a node, all on one network. `leaf=8` ends such a switch at 8 nodes: the leaves of all rails meet
in one spine, by uplinks that carry what their nodes can send, divided by `oversubscription` ("3:1",
"2", "3/2"). Without it, each rail's switch takes all nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Link, Vertex, groups
from linkweave.topology.machines import MAX_N, both, ordered
from linkweave.topology.topology import Topology

_HEAD = re.compile(r"(\d{1,18})\s*[x*]\s*([^\s=]+)\s*(.*)", re.IGNORECASE | re.DOTALL)
_RATE = r"(?=.*[1-9])(\d{1,6}(?:\.\d{1,6})?)\s*(GB/s|Gb/s|Gbit/s)"
_SOME = r"(?=\d*[1-9])\d{1,6}"  # a number above 0
_SOLD = {  # by how names begin
    "dgx1": 1, "dgx2": 1, "dgx-a100": 2, "dgx-h100": 4, "dgx-h200": 4, "dgx-b200": 4,
}  # fmt: skip
"""The NICs with which machines are sold, in units of 100 Gbit/s: NVIDIA's data sheets."""
_USUAL = 2
_KEYS = ("nics", "nic", "leaf", "oversubscription", "latency")


def cluster(
    machine: Topology,
    nodes: int,
    nics: str = "rail",
    nic: int | None = None,
    leaf: int | None = None,
    oversubscription: Fraction | int = 1,
    latency_us: float = 5.0,
    name: str | None = None,
) -> Topology:
    """Join `nodes` copies of a machine by one network.

    The g-th GPU of node i gets the number i * (GPUs of a node) + g, and its switch s the name
    "node{i}.s". `nic` is the bandwidth of a NIC in bytes/s each way, unless the machine's file
    tells it; by default that with which a DGX is sold, and for others 24 GB/s (200 Gbit/s). `leaf`
    is the number of nodes on a leaf switch. Raises TopologyError for arguments that make no sense
    and for more than 4,096 GPUs.
    """
    sold = next((n for name, n in _SOLD.items() if machine.name.startswith(name)), None)
    assumed, nic = nic is None, (sold or _USUAL) * speeds.NETWORK if nic is None else nic
    size = len(machine.gpus)
    if not nodes >= 1 or nodes * size > MAX_N:
        raise TopologyError(
            f"{nodes} nodes of {machine.name} with {size} GPUs each: from 1 node to {MAX_N} GPUs"
        )
    if nics not in ("rail", "1"):
        raise TopologyError(f'nics={nics!r}: choose "rail" (one for each GPU) or "1" (one a node)')
    if nic <= 0 or (leaf is not None and leaf < 1) or oversubscription <= 0:
        raise TopologyError(
            f"nic {nic}, leaf {leaf} and oversubscription {oversubscription} must be positive"
        )
    if any(link.kind in ("memory", "network") for link in machine.fabric):
        raise TopologyError(f"{machine.name} cannot be a node: its GPUs share memory or a network")
    if machine.forwarders:
        raise TopologyError(f"{machine.name} cannot be a node: it has forwarders without a rank")
    if leaf is None and oversubscription != 1:
        raise TopologyError("oversubscription is of the leaves' uplinks: give leaf as well")
    inner, ports = _node(machine, nics, nic, latency_us)
    assumptions = machine.assumptions
    if nodes > 1 and not any(k.kind == "network" for k in machine.links):
        why = f", as a {machine.name} is sold" if sold else ""
        if assumed:
            assumptions += (f"NICs of {nic / speeds.GB:g} GB/s{why}: nic= tells others",)
        elif any(isinstance(k.src, int) and k.dst in dict(ports) for k in inner):
            assumptions += ("GPUs' PCIe ports as fast as the NICs",)
    index = {g: i for i, g in enumerate(machine.gpus)}
    links: list[Link] = []
    for i in range(nodes):

        def there(v: Vertex, i: int = i) -> Vertex:
            return i * size + index[v] if isinstance(v, int) else f"node{i}.{v}"

        links += [replace(k, src=there(k.src), dst=there(k.dst)) for k in inner]
    per_leaf = nodes if leaf is None else leaf
    uplinks: dict[str, int] = {}
    for i in range(nodes):
        for r, (port, bandwidth) in enumerate(ports):
            switch = f"rail{r}" if len(ports) > 1 else "net"
            if per_leaf < nodes:
                switch = f"{switch}.leaf{i // per_leaf}"
                uplinks[switch] = uplinks.get(switch, 0) + bandwidth
            links += both(f"node{i}.{port}", switch, bandwidth, latency_us=latency_us,
                          kind="network")  # fmt: skip
    for switch, total in uplinks.items():
        bandwidth = max(1, int(total / Fraction(oversubscription)))
        links += both(switch, "spine", bandwidth, latency_us=latency_us, kind="network")
    devices = [
        GpuId(i * size + index[d.gpu], model=d.model, sm=d.sm)
        for i in range(nodes) for d in machine.devices if d.sm
    ]  # fmt: skip
    return Topology(
        name or f"{nodes} x {machine.name}",
        tuple(range(nodes * size)),
        ordered(links if nodes > 1 else [k for k in links if k.kind != "network"]),
        assumptions,
        tuple(devices),
        reducing=tuple(f"node{i}.{switch}" for i in range(nodes) for switch in machine.reducing),
    )


def _node(
    machine: Topology, nics: str, nic: int, latency_us: float
) -> tuple[list[Link], list[tuple[str, int]]]:
    """The links of a node, and its NICs with their bandwidths in bytes/s."""
    inner = [k for k in machine.links if k.kind != "network"]
    told = {k.src: k for k in machine.links if k.kind == "network" and isinstance(k.src, str)
            and _ends(machine, k.src)}  # fmt: skip
    near = [k for k in machine.links if k.kind in ("pcie", "host") and isinstance(k.src, int)]
    if told:
        chosen = list(told.values())[: None if nics == "rail" else 1]
        inner += [k for c in chosen for k in (c, machine.by_ends[c.dst, c.src])]
        return inner, [(str(c.src), c.bandwidth) for c in chosen]
    if nics == "rail":
        hosts: Sequence[Vertex] = machine.gpus
        if near:  # one for each PCIe switch; a GPU straight under a CPU has its own
            hosts = list(dict.fromkeys(k.dst if k.kind == "pcie" else k.src for k in near))
    elif near:
        hosts = [_root(machine, near[0].dst)]
    else:
        hosts = ["host"]
        inner += [k for g in machine.gpus for k in both(g, "host", nic, kind="host")]
    names = [f"nic{i}" for i in range(len(hosts))]
    switches = {k.dst for k in near if k.kind == "pcie"}
    for host, name in zip(hosts, names, strict=True):
        kind = "host" if isinstance(host, str) and host not in switches else "pcie"
        inner += both(host, name, nic, latency_us=latency_us, kind=kind)
    return inner, [(name, nic) for name in names]


def _ends(machine: Topology, v: Vertex) -> bool:
    return sum(k.src == v for k in machine.links) == 1


def _root(machine: Topology, at: Vertex) -> Vertex:
    """The CPU of a PCIe switch; the vertex itself if it is not a switch."""
    up = [
        k.dst for k in machine.links if k.src == at and k.kind == "host" and isinstance(k.dst, str)
    ]
    return up[0] if up and any(k.src == at and k.kind == "pcie" for k in machine.links) else at


def nodes_of(topology: Topology) -> list[tuple[int, ...]]:
    """The GPUs of each node: those that stay connected without the network."""
    local = [(k.src, k.dst) for k in topology.links if k.kind != "network"]
    nodes = groups(topology.gpus, local)
    return [tuple(g for g in node if isinstance(g, int)) for node in nodes]


def looks_like_cluster(text: str) -> bool:
    return bool(_HEAD.match(_plain(text)))


def _plain(text: str) -> str:
    return " ".join(re.sub(r"#.*", "", line).strip() for line in text.splitlines()).strip()


def parse_cluster(
    text: str, load: Callable[[str], Topology], where: str = "", name: str | None = None
) -> Topology:
    """Read a cluster's description. `load` reads the node; `where` is put before errors."""
    plain = _plain(text)
    head = _HEAD.match(plain)
    if head is None:
        raise TopologyError(
            f'{where}a cluster is like "16 x dgx-a100 nics=rail", not {plain[:80]!r}'
        )
    given: dict[str, str] = {}
    for word in head[3].split():
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise TopologyError(
                f"{where}{word[:80]!r} in a cluster's description; known are "
                + ", ".join(f"{k}=" for k in _KEYS)
            )
        if key in given:
            raise TopologyError(f"{where}{key}= is given twice")
        given[key] = value

    def told(key: str, default: str, pattern: str, hint: str) -> re.Match[str]:
        text = given.get(key, default)
        if not (found := re.fullmatch(pattern, text)):
            raise TopologyError(f"{where}{key}={text!r}: {hint}")
        return found

    above, below = told(
        "oversubscription", "1", rf"({_SOME})(?:[:/]({_SOME}))?", "a ratio is like 2, 3:1 or 3/2"
    ).groups()
    us = told("latency", "5us", r"(\d{1,9}(?:\.\d{1,9})?)us", "must be like 5us")[1]
    nic = leaf = None
    if "nic" in given:
        rate, unit = told("nic", "", _RATE, "a rate is like 25GB/s or 200Gb/s").groups()
        nic = int(Fraction(rate) * speeds.GB / (1 if unit == "GB/s" else 8))
    if "leaf" in given:
        leaf = int(told("leaf", "", r"\d{1,6}", "must be a number of nodes")[0])
    ratio, node = Fraction(int(above), int(below or 1)), load(head[2])
    if node.name.startswith(f"{head[2]} of "):  # a model
        plain = plain.replace(head[2], node.name, 1)
    return cluster(
        node, int(head[1]), given.get("nics", "rail"), nic, leaf, ratio, float(us), name or plain
    )
