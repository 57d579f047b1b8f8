"""The tables of `linkweave simulate --gtopk` as text."""

from __future__ import annotations

from linkweave.bench.options import table
from linkweave.bench.reproduce.gtopk import Breakdown, Collective, Rows, Step
from linkweave.bench.reproduce.gtopk_paper import WORKERS

NAMES = {"dense": "dense", "topk": "top-k", "gtopk": "gTop-k"}

EQUATIONS = """\
Table I: P workers, m elements of 4 bytes, k = m / 1000 entries, a = 0.436 ms, b = 36 ns an element
  dense  (equation 5)  2 (P - 1) a + 2 (P - 1) / P m b
  top-k  (equation 6)  log2(P) a + 2 (P - 1) k b
  gTop-k (equation 7)  2 log2(P) a + 4 log2(P) k b
  tree                 2 ceil(log2 P) (a + 2 k b): linkweave's, for any P; (7) at powers of two"""

LEGEND9 = """\
script: as the authors' script draws the figure, which leaves a out of (6) and (7) and so counts
1 ms a round; the paper prints no values. diff: the equation less the script. planned: linkweave's
tree and its broadcast in chunks, on a cluster with this a and b, up to 32 workers."""

LEGEND10 = """\
paper: the repository's raw figures; diff: ours less the paper's, in percentage points. A step of
ours is the iteration of table VI, the selection that the paper measured and the equation."""

LEGEND7 = """\
printed: table VII; raw: the repository's figures, which differ for gTop-k on VGG-16; diff: ours
over raw, less 1; g/x: gTop-k over this method; the model explains: s of communication by the
equation, of what a raw step is longer than computing (table VI) and selecting (figure 11)."""

LEGEND11 = """\
compute: table VI, beside figure 11's own; compress: kernels.sparsify on one core of this machine,
measured now (the paper gives no memory bandwidth of its GPU, from which to take a bound);
communicate: equation 7."""

LEGEND_WHY = """\
measured: communication in figure 11; (7): by equation 7; 16 B: with 16 bytes an entry, a float64
for index and value each, as the repository sends; entries: those over PCIe (250 MB/s), both ways;
rounds: what grows with log2 P, from raw steps of 4 and 32 workers; copies: the rest, in passes of
the whole gradient over PCIe (-: the growth is within the noise of a step); planned: as above."""

WHY = """\
Why ours differ:
Dense: for the large models, raw communication takes 1.2 to 1.4 times equation 5 on 4 and 8 workers,
3 to 3.6 times on 16 and 9.5 to 12 times on 32: no term stands for a network that slows as workers
join. Top-k likewise grows faster with P than equation 6.
gTop-k: 16 bytes an entry do not explain it: they add at most 44 ms. Rounds (a, b, merging in NumPy
and all else that a round does) explain about a tenth. The rest hardly depends on P and is in
proportion to the model: 3.0 to 3.1 passes over PCIe at its peak rate. Algorithm 3 returns a result
and a mask of m elements, so a dense gradient down, and both up, would be three. This is inferred
from the figures, not known: the text and the published code move only k entries over PCIe.
ResNet-20: table VI has 876 images/s of one GPU, the raw figures 921, which is 7 ms a step; so on 4
workers the measured efficiency exceeds ours. Figure 11 sums to 0.172 s, a raw step takes 0.162 s.
VGG-16: figure 11 sums to 1.04 s a step, so 3,942 images/s as in the raw figures, not the 3,020 of
table VII. Computing takes 0.140 s there and 0.097 s in table VI; for AlexNet 0.257 s and 0.369 s.
The repository's VGG-16 has one fully connected layer, not the three that section IV-E names."""


def tables(found: Rows) -> str:
    """All tables with their legends, at most 100 columns wide."""
    k = found.crossovers
    small, large = (f"{found.crossing[p] * 4e-6:.1f} MB on {p} workers" for p in (32, 64))
    return "\n\n".join((
        EQUATIONS,
        f"Figure 9: ms of an all-reduce of 100 MB (25 Mi elements); then by size\n"
        f"{_figure9(found.figure9)}\n{LEGEND9}\n"
        f"gTop-k is faster than top-k at 100 MB from {k['equations']} workers on; as the script "
        f"draws it from {k['script']}, and\nwith whole rounds (P not a power of two) for good from "
        f"{k['tree']}; by size from {small} and\n{large}. Like the paper: top-k is slightly faster "
        f"for few workers, much slower on 32.",
        f"Figure 10: scaling efficiency in %, by workers\n{_figure10(found.figure10)}\n{LEGEND10}",
        f"Table VII: images/s of 32 workers\n{_table7(found.figure10)}\n{LEGEND7}",
        f"Figure 11: s of a step of gTop-k on 32 workers\n{_figure11(found.figure11)}\n{LEGEND11}",
        f"What explains gTop-k's communication on 32 workers, in s\n{_parts(found.figure11)}\n"
        f"{LEGEND_WHY}",
        WHY,
    ))  # fmt: skip


def _figure9(found: tuple[Collective, ...]) -> str:
    heads = ("P", "Mi elements", "dense", "top-k", "script", "diff", "gTop-k", "script", "diff",
             "tree", "planned")  # fmt: skip

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    return table(heads, [
        (c.workers, c.numel >> 20, ms(c.dense), ms(c.topk), ms(c.script_topk),
         ms(c.topk - c.script_topk), ms(c.gtopk), ms(c.script_gtopk), ms(c.gtopk - c.script_gtopk),
         ms(c.tree), "-" if c.simulated is None else ms(c.simulated))
        for c in found
    ], ())  # fmt: skip


def _figure10(found: tuple[Step, ...]) -> str:
    heads = ["", ""]
    for workers in WORKERS[1:]:
        heads += [f"P={workers}", "paper", "diff"]
    lines: dict[tuple[str, str], list[str]] = {}
    for s in found:
        if s.workers > 1:
            ours, theirs = 100 * s.efficiency, 100 * s.measured_efficiency
            line = lines.setdefault((s.model, NAMES[s.method]), [])
            line += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours - theirs:+.0f}"]
    return table(heads, [(*key, *cells) for key, cells in lines.items()], (0, 1))


def _table7(found: tuple[Step, ...]) -> str:
    rows = {(s.model, s.method): s for s in found if s.printed is not None}
    lines = []
    for (model, method), s in rows.items():
        best = rows[model, "gtopk"]
        assert s.printed and best.printed
        lines.append((
            model, NAMES[method], s.printed, f"{s.measured:.0f}", f"{s.throughput:.0f}",
            f"{s.throughput / s.measured - 1:+.0%}", f"{best.printed / s.printed:.2f}",
            f"{best.throughput / s.throughput:.2f}",
            f"{s.communication:.3f} of {s.measured_communication:.3f} s",
        ))  # fmt: skip
    heads = ("", "", "printed", "raw", "ours", "diff", "g/x printed", "g/x ours",
             "the model explains")  # fmt: skip
    return table(heads, lines, (0, 1))


def _figure11(found: tuple[Breakdown, ...]) -> str:
    lines = []
    for b in found:
        for what, theirs, ours in (
            ("compute", b.measured_compute, b.compute),
            ("compress", b.measured_selection, b.selection),
            ("communicate", b.measured_communication, b.communication),
        ):
            lines.append((b.model, what, f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}"))
    return table(("", "", "paper", "ours", "diff"), lines, (0, 1))


def _parts(found: tuple[Breakdown, ...]) -> str:
    heads = ("", "measured", "(7)", "16 B", "entries", "rounds", "copies", "planned")
    return table(heads, [
        (b.model, f"{b.measured_communication:.4f}", f"{b.communication:.4f}", f"{b.wide:.4f}",
         f"{b.entries:.4f}", "-" if b.copies is None else f"{b.growing:.4f}",
         "-" if b.copies is None else f"{b.copies:.2f}", f"{b.simulated:.4f}")
        for b in found
    ])  # fmt: skip
