"""`linkweave reproduce c-cube-14`: trees against rings up to 1,024 ranks, simulated.

This is figure 14 of the C-Cube paper, whose text names neither node counts nor link speeds. Each
algorithm gets only the links that it uses, at 25 GB/s and 5 us. "Constant bandwidth" is read in two
ways: every link has the same bandwidth; or every rank has, and then a tree's links get a quarter of
a ring's, because a rank sends over up to four links at once in an overlapped double tree and over
one in a ring. Ratios of times use each algorithm's best number of chunks, turnaround the paper's
chunks of 256 KiB (256 of 64 MiB).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product, starmap

from linkweave import collectives
from linkweave.collectives.planning.algorithms.trees import Tree, two_trees
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.lower import MOST_SQUARED
from linkweave.topology import Link, Topology

RANKS = tuple(1 << i for i in range(2, 11))
SIZES = (16 << 10, 1 << 20, 64 << 20)
CHUNK = 256 << 10
BANDWIDTH, ALPHA_US = 25_000_000_000, 5.0
PAPER = "paper: C1 over R up to 20 at 16 KB and 1 MB, up to 1.35 at 64 MB; turnaround 29, up to 69"


@dataclass(frozen=True, slots=True)
class Row:
    """Simulated times in seconds, and those of closed forms (`..._form`).

    `tree` is the overlapped double tree on full links, `thin_tree` on links with a quarter of the
    bandwidth. Beyond 64 ranks `ring` is its closed form, because the plan grows as P^2.
    """

    ranks: int
    nbytes: int
    depth: int
    tree: float
    tree_form: float
    thin_tree: float
    thin_tree_form: float
    ring: float
    ring_form: float
    turnaround: float
    turnaround_form: float
    baseline_turnaround: float
    baseline_turnaround_form: float

    @property
    def worst(self) -> float:
        """The largest relative difference between simulation and closed form."""
        pairs = (
            (self.tree, self.tree_form), (self.thin_tree, self.thin_tree_form),
            (self.ring, self.ring_form), (self.turnaround, self.turnaround_form),
            (self.baseline_turnaround, self.baseline_turnaround_form),
        )  # fmt: skip
        return max(abs(found / form - 1) for found, form in pairs)


def wired(name: str, ranks: int, ends: Iterable[tuple[int, int]], bandwidth: int) -> Topology:
    """Ranks joined by one link for each of these pairs, both ways."""
    counts = Counter(way for a, b in ends for way in ((a, b), (b, a)))
    links = (Link(a, b, bandwidth, n, ALPHA_US) for (a, b), n in sorted(counts.items()))
    return Topology(name, tuple(range(ranks)), tuple(links))


def _step(nbytes: int, chunks: int, bandwidth: int) -> float:
    """Seconds of one chunk step: alpha and a chunk's bytes (a multiple of 16)."""
    return ALPHA_US * 1e-6 + -(-nbytes // (chunks * 16)) * 16 / bandwidth


def _row(ranks: int, nbytes: int) -> Row:
    trees = two_trees(ranks)
    depth = max(tree.depth for tree in trees)
    full, thin = (_machine(ranks, trees, BANDWIDTH // part) for part in (1, 4))
    times: list[float] = []
    for machine, bandwidth in ((full, BANDWIDTH), (thin, BANDWIDTH // 4)):
        plan = collectives.plan_allreduce(machine, nbytes, "overlapped_double_tree")
        steps = -(-plan.num_chunks // 2) + 2 * depth - 1
        times.append(collectives.simulate(plan, machine, nbytes).seconds)
        times.append(steps * _step(nbytes, plan.num_chunks, bandwidth))
    chunks = max(2, nbytes // CHUNK)
    step = _step(nbytes, chunks, BANDWIDTH)
    first = []
    for name in ("overlapped_double_tree", "double_tree"):
        plan = collectives.plan_allreduce(full, nbytes, name, chunks)
        first.append(collectives.simulate(plan, full, nbytes).first_chunk_seconds)
    ring_form = 2 * (ranks - 1) * _step(nbytes, ranks, BANDWIDTH)
    return Row(
        ranks, nbytes, depth, *times, _ring(ranks, nbytes, ring_form), ring_form,
        first[0], 2 * depth * step, first[1], (chunks // 2 + 2 * depth - 1) * step,
    )  # fmt: skip


def _machine(ranks: int, trees: Iterable[Tree], bandwidth: int) -> Topology:
    edges = (edge for tree in trees for edge in tree.edges)
    return wired(f"double tree of {ranks}", ranks, edges, bandwidth)


def _ring(ranks: int, nbytes: int, form: float) -> float:
    if ranks > MOST_SQUARED:
        return form
    links = (Link(r, (r + 1) % ranks, BANDWIDTH, 1, ALPHA_US) for r in range(ranks))
    machine = Topology(f"one ring of {ranks}", tuple(range(ranks)), tuple(links))
    plan = collectives.plan_allreduce(machine, nbytes, "ring", ranks)
    return collectives.simulate(plan, machine, nbytes).seconds


def rows() -> Iterator[Row]:
    return starmap(_row, product(RANKS, SIZES))


def table(found: list[Row]) -> str:
    """What was simulated, and where it comes nearest to the paper's figures."""
    lines = [
        "overlapped double tree (C1) against one ring (R), and the first chunk's turnaround",
        "against the baseline double tree (B); simulated, 25 GB/s a link, 5 us a step",
        "",
        f"{'ranks':>6}{'size':>9}{'depth':>7}{'R / C1':>9}{'same bandwidth a rank':>24}"
        f"{'turnaround B / C1':>20}{'off closed form':>17}",
    ]
    for r in found:
        lines.append(
            f"{r.ranks:6}{size_text(r.nbytes):>9}{r.depth:7}{r.ring / r.tree:9.2f}"
            f"{r.ring / r.thin_tree:24.2f}{r.baseline_turnaround / r.turnaround:20.2f}"
            f"{r.worst:17.2e}"
        )
    small = [r for r in found if r.nbytes < SIZES[-1]]
    large = [r for r in found if r.nbytes == SIZES[-1]]
    waits = [r.baseline_turnaround / r.turnaround for r in large]
    lines += [
        "",
        PAPER,
        _nearest("20 (small messages)", small, 20.0, lambda r: r.ring / r.thin_tree),
        _nearest("1.35 (64 MiB)", large, 1.35, lambda r: r.ring / r.thin_tree),
        _nearest("29 (64 MiB)", large, 29.0, lambda r: r.baseline_turnaround / r.turnaround),
        _nearest("69 (64 MiB)", large, 69.0, lambda r: r.baseline_turnaround / r.turnaround),
        f"turnaround at 64 MiB: {sum(waits) / len(waits):.1f} on average over these ranks, "
        f"{max(waits):.1f} at most",
    ]
    return "\n".join(lines)


def _nearest(what: str, found: list[Row], wanted: float, of: Callable[[Row], float]) -> str:
    row = min(found, key=lambda r: abs(of(r) - wanted))
    return f"nearest to {what}: {of(row):.2f} at {row.ranks} ranks, {size_text(row.nbytes)}"
