"""Machines with links or NICs more or fewer than a given one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import DIRECT, Link, Vertex
from linkweave.topology.machines import ordered
from linkweave.topology.text import counted
from linkweave.topology.topology import Topology

_NAMED = 8  # neighbours that an error names
_ENDS = re.compile(r"([^-=\s]+)-([^-=\s]+)(?:=(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Ends:
    """Two vertices of a machine, and a number of physical links between them; None for all."""

    one: Vertex
    other: Vertex
    count: int | None = None


def parse_ends(text: str, where: str) -> Ends:
    """Read "2-6", "2-6=1" or "0-nvswitch=3". Raises TopologyError."""
    found = _ENDS.fullmatch(text.strip())
    if found is None or found[3] == "0":
        raise TopologyError(f"{where} is like 2-6, 2-6=1 or 0-nvswitch=3, not {text[:40]!r}")
    one, other = (int(end) if end.isdecimal() else end for end in found.group(1, 2))
    return Ends(one, other, int(found[3]) if found[3] else None)


def without_links(topology: Topology, ends: Ends) -> Topology:
    """Return the machine without so many of the links between two vertices, each way.

    Raises TopologyError if they have fewer.
    """
    links = []
    found = 0
    for link in topology.links:
        if {link.src, link.dst} != {ends.one, ends.other}:
            links.append(link)
            continue
        found += 1
        left = 0 if ends.count is None else link.count - ends.count
        if left < 0:
            raise TopologyError(
                f"{topology.name} has {counted(link.count, 'link')} from {link.src} to "
                f"{link.dst}: cannot remove {ends.count}"
            )
        if left:
            links.append(replace(link, count=left))
    if not found:
        near = {str(link.dst) for link in topology.links if link.src == ends.one}
        names = ", ".join(sorted(near, key=lambda name: (len(name), name)))
        joined = f"; {ends.one} has links to {names}" if 0 < len(near) <= _NAMED else ""
        raise TopologyError(f"{topology.name} has no link {ends.one}-{ends.other}{joined}")
    return _named(topology, links, f"without {_text(ends)}")


def with_links(topology: Topology, ends: Ends) -> Topology:
    """Return the machine with more links between two vertices, each way; one if no number is given.

    Links that are there become more; new ones are like the one of the other direction, or NVLinks
    as fast as the machine's. Raises TopologyError for vertices that the machine does not have.
    """
    known: set[Vertex] = {*topology.gpus, *topology.forwarders, *topology.switches}
    for end in (ends.one, ends.other):
        if end not in known:
            raise TopologyError(f"{topology.name} has no GPU or switch {end!r}")
    more = ends.count or 1
    between = {(ends.one, ends.other), (ends.other, ends.one)}
    links = [
        replace(link, count=link.count + more) if (link.src, link.dst) in between else link
        for link in topology.links
    ]
    lacking = sorted(between - set(topology.by_ends), key=str)
    assumed = Link(0, 1, speeds.NVLINK, 1, 5.0, "nvlink", True)
    nvlink = next((k for k in topology.links if k.kind in DIRECT), assumed)
    for a, b in lacking:
        like = topology.by_ends.get((b, a), nvlink)
        links.append(replace(like, src=a, dst=b, count=more))
    return _named(topology, links, f"with {_text(replace(ends, count=more))}")


def with_nics(topology: Topology, more: int) -> Topology:
    """Return a cluster with `more` NICs beside each NIC of each node, on the same switch or CPU.

    NICs on a GPU share its PCIe port. Raises TopologyError for a machine without a network.
    """
    if more < 1:
        raise TopologyError(f"the number of NICs to add must be at least 1, not {more}")
    if not (nics := _nics(topology)):
        raise TopologyError(f"{topology.name} is one machine: NICs join the nodes of a cluster")
    gpus = {*topology.gpus}
    links = [
        replace(link, count=link.count * (1 + more))
        if (ends := {link.src, link.dst}) & nics and not ends & gpus
        else link
        for link in topology.links
    ]
    return _named(topology, links, f"with {counted(more, 'more NIC')} beside each")


def nics_on_gpus(topology: Topology) -> bool:
    """Whether there are NICs on GPUs' ports, which `with_nics` leaves as they are."""
    nics = _nics(topology)
    return any(link.dst in nics and isinstance(link.src, int) for link in topology.links)


def _nics(topology: Topology) -> set[Vertex]:
    return {
        end
        for link in topology.links
        if link.kind == "network"
        for end in (link.src, link.dst)
        if str(end).startswith("node")
    }


def _named(topology: Topology, links: Iterable[Link], words: str) -> Topology:
    """Measured times of all-reduces hold for the machine as it was, so they are left out."""
    return replace(topology, name=f"{topology.name} {words}", links=ordered(links), timings=())


def _text(ends: Ends) -> str:
    return f"{ends.one}-{ends.other}" + (f"={ends.count}" if ends.count else "")
