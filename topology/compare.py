"""Compare two machines: find a renumbering that makes them equal, or list differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from linkweave.topology.graph import KINDS
from linkweave.topology.loading import load
from linkweave.topology.text import cables, vertex
from linkweave.topology.topology import Topology

_MOST = 12  # differing pairs that are listed


def compare(one: Topology | str, other: Topology | str) -> tuple[dict[int, int] | None, list[str]]:
    """Return a renumbering that makes `one`'s fabric `other`'s, or None, and the differences.

    Fabrics are compared as by `Topology.isomorphic_to`. Differences of other links (PCIe, NICs) are
    listed even if there is a renumbering. Either is a `Topology`, or what `topology.load` takes.
    """
    one, other = load(one), load(other)
    mapping = one.isomorphic_to(other)
    return mapping, list(_differences(one, other, mapping))


def _differences(one: Topology, other: Topology, mapping: dict[int, int] | None) -> Iterator[str]:
    if len(one.gpus) != len(other.gpus):
        yield f"{len(one.gpus)} GPUs against {len(other.gpus)}"
    mine, theirs = _counts(one), _counts(other)
    for kind, bandwidth in sorted({*mine, *theirs}):
        here, there = mine[kind, bandwidth], theirs[kind, bandwidth]
        if here != there:
            yield f"{here} {KINDS[kind][here != 1]} of {bandwidth / 1e9:g} GB/s against {there}"
    if mapping is not None:
        return
    same = _plain(one, counts=True).isomorphic_to(_plain(other, counts=True))
    if same is not None:
        yield f"the same wiring but for the links' speeds, {in_words(same)}"
        return
    pairs = _plain(one, counts=False).isomorphic_to(_plain(other, counts=False))
    if pairs is not None:
        yield f"the same pairs are joined, by other numbers of links, {in_words(pairs)}"
    shared = [g for g in one.gpus if g in other.gpus]
    listed = [
        f"{vertex(a)} to {vertex(b)}: {one.cell(a, b)} against {other.cell(a, b)}"
        for i, b in enumerate(shared) for a in shared[:i] if one.cell(a, b) != other.cell(a, b)
    ]  # fmt: skip
    if listed:
        yield f"by the same numbers, {len(listed)} pairs of GPUs are joined otherwise:"
        yield from (f"  {line}" for line in listed[:_MOST])
        if len(listed) > _MOST:
            yield f"  ... and {len(listed) - _MOST} more"


def _counts(topology: Topology) -> Counter[tuple[str, int]]:
    counts: Counter[tuple[str, int]] = Counter()
    for link, _ in cables(topology.links):
        counts[link.kind, link.bandwidth] += link.count
    return counts


def _plain(topology: Topology, counts: bool) -> Topology:
    """The fabric with all links equally fast and, without counts, single."""
    links = tuple(
        replace(link, bandwidth=1, count=link.count if counts else 1) for link in topology.fabric
    )
    return replace(topology, links=links)


def in_words(mapping: dict[int, int]) -> str:
    """ "with GPUs 0 1 2 as 2 0 1"."""
    if all(a == b for a, b in mapping.items()):
        return "with the GPUs numbered alike"
    return f"with GPUs {' '.join(map(str, mapping))} as {' '.join(map(str, mapping.values()))}"
