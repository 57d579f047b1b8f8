"""The tables of `linkweave simulate --embrace` as text."""

from __future__ import annotations

from linkweave.bench.options import table
from linkweave.bench.reproduce.embrace import (
    Crossing,
    Gradient,
    Overhead,
    Point,
    Rows,
    Speed,
)
from linkweave.bench.reproduce.embrace_costs import WAYS
from linkweave.bench.reproduce.embrace_paper import GPUS, MODELS, STALLS, WORKERS
from linkweave.bench.reproduce.embrace_step import UTILISATIONS

NAMES = {
    "alltoall": "all-to-all", "allreduce": "all-reduce", "ps": "PS", "allgather": "all-gather",
}  # fmt: skip
MIDDLE = UTILISATIONS[1]

EQUATIONS = """\
Table 2: N workers on n nodes, a table of M bytes, density d, B = 12.5 GB/s, start-up b = 7.0 us
  all-to-all  2 (N - 1) (d M / (N B) + b)
  all-reduce  2 (N - 1) (M / (N B) + b)
  PS          2 N (d M / (n B) + b)
  all-gather  (N - 1) (d M / B + b)
B is the paper's 100 Gbit/s. b is assumed, as the paper gives none: MG-WFBP's fit to InfiniBand."""

LEGEND2 = """\
original, coalesced: the paper's sizes of gradients (table 3), of two tables of 32,320 x 1024.
shared: the GPUs of a node share its adapter, through which all-to-all sends most; the larger of
that and table 2. exact: overlap.embedding_ways with all indices, table by table, not shared."""

LEGEND3 = """\
Tokens of a batch are the paper's original MB over the bytes of a row, so the first column agrees
by construction. zipf: independent tokens, the frequency of rank r in proportion to 1 / r; neither
sentences nor padding. corpus: the words of --corpus in order, each worker in its own part. prior:
rows that the next batches of all 16 workers look up; own: that the worker's own next batch does.
(The paper does not say which, nor for how many workers.) Right: reductions in % by coalescing, and
further by priority."""

LEGEND4 = """\
The paper measured all-to-all to be the fastest above 40 % sparsity in 4a, and everywhere in 4b. By
table 2 it is the fastest everywhere, but where so little is sent that all-gather's fewer start-ups
decide; with a shared adapter, above 56 % in 4a."""

LEGEND7 = """\
paper: the range that its text states (numbers of single bars are in no text). N: at 50 % of the
GPU's peak. range: over 25, 50 and 100 % of the peak and all N. best: the fastest baseline for each
N, at 50 %. The paper's: on RTX3090 AllGather, but AllReduce for GNMT-8 and Transformer on 16, and
AllReduce or BytePS for BERT-base; on RTX2080 AllGather, but Parallax on 16, for LM also on 8. LM on
RTX2080 is not reproduced, because its tables lie in host memory there."""

LEGEND8 = """\
A stall is what a step takes longer than it computes: the best baseline's over EmbRace's. The text
states ranges over all models only."""

MODEL = """\
Assumed for figures 7 and 8, as the paper has no times of computing: a forward pass takes two
operations for each dense parameter and token, at a share of the float32 peak of NVIDIA's data
sheets (35.6 and 10.1 TFLOP/s); the backward pass takes twice as long; the blocks of a model are
equal. Costs are "shared" as above, gradients of zipf. Baselines send original gradients first in,
first out, and the next forward pass waits for all; BytePS sends dense ones over PS by priority.
EmbRace sends coalesced ones: prior rows, then lookups and dense gradients in forward order, then
delayed rows. Selecting rows and looking them up takes no time."""

WHY = """\
Why ours differ:
Figure 4a: by table 2 all-to-all is never slower than all-reduce, so what the paper measured below
40 % needs another reason. One adapter for four GPUs is one: all-to-all then sends 4 d M through it
and a ring 1.75 M, which cross at 56 %. What moves that to 40 % is not known: the figure has no
rates in text.
Sparsity: section 4.1.2 counts original gradients (89.7 % for GNMT-8). Coalesced ones, which EmbRace
sends, are sparser: LM 99.8 %, GNMT-8 95.2 %, Transformer 93.7 %, BERT-base 93.8 %.
Table 3: BERT-base's 36.0 MB are exactly 32 x 384 rows, so its batches are padded, and padding
coalesces into one row; zipf has none. LM repeats fewer words than zipf; its softmax may draw
samples. Priority: for each model the paper's reduction lies between zipf's for one worker's next
batch and for those of 16.
Figures 7 and 8: ours are mostly smaller. At 12.5 GB/s sparse gradients take a few ms, beside
computing of 17 ms (LM) to 356 ms (BERT-base on RTX3090, at 50 % of the peak), so less is left to
gain. Transfers slower than B, such as of GPUs that share PCIe, would raise the speed-up, and so
would faster computing for most models; the paper gives neither, so neither is adjusted here."""


def tables(found: Rows) -> str:
    """All tables with their legends, at most 100 columns wide."""
    return "\n\n".join((
        EQUATIONS,
        f"Table 2 for GNMT-8: ms\n{_table2(found.table2)}\n{LEGEND2}",
        f"Table 3: MB of a worker's embedding gradients\n{_table3(found.table3)}\n{LEGEND3}",
        f"Figure 4: ms for the embedding of GNMT-8, by sparsity\n{_figure4(found.figure4)}\n"
        f"{_crossings(found.crossings)}\n{LEGEND4}",
        f"Figure 7: speed-up over the best baseline\n{_figure7(found.figure7)}\n{LEGEND7}",
        f"Figure 8: stalls on 16 GPUs, x EmbRace's\n{_figure8(found.figure7)}\n{LEGEND8}",
        MODEL,
        WHY,
    ))  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _table2(found: tuple[Overhead, ...]) -> str:
    lines: dict[tuple[int, int, str], list[str]] = {}
    for o in found:
        line = lines.setdefault((o.workers, o.nodes, NAMES[o.way]), [])
        line += [_ms(o.equation), _ms(o.shared)]
        if o.gradient == "coalesced":
            line.append(_ms(o.exact))
    heads = ("N", "n", "", "original", "shared", "coalesced", "shared", "exact")
    return table(heads, [(*key, *cells) for key, cells in lines.items()], (2,))


def _table3(found: tuple[Gradient, ...]) -> str:
    papers = {m.name: m for m in MODELS}
    lines = []
    for g in found:
        m = papers[g.model]
        if g.stream == "zipf":
            lines.append((g.model, "paper", "", m.original, m.coalesced, m.prioritized, "",
                          m.coalescing, m.priority, ""))  # fmt: skip
        lines.append((
            g.model, g.stream, f"{g.tokens} of {g.vocabulary}", f"{g.original:.1f}",
            f"{g.coalesced:.1f}", f"{g.prior:.1f}", f"{g.own_prior:.1f}", f"{g.coalescing:.1f}",
            f"{g.priority:.1f}", f"{g.own_priority:.1f}",
        ))  # fmt: skip
    heads = ("", "", "tokens of rows", "original", "coalesced", "prior", "own", "coalescing",
             "priority", "own")  # fmt: skip
    return table(heads, lines, (0, 1))


def _figure4(found: tuple[Point, ...]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for p in found:
        line = lines.setdefault((p.figure, f"{p.sparsity:.0%}"), [])
        line += [_ms(p.equation), *[_ms(p.shared)] * (p.way == "alltoall")]
    heads = ("", "sparsity", NAMES["alltoall"], "shared", *(NAMES[way] for way in WAYS[1:]))
    return table(heads, [(*key, *cells) for key, cells in lines.items()])


def _crossings(found: tuple[Crossing, ...]) -> str:
    def span(ends: tuple[float, float] | None) -> str:
        return "never" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"

    return "All-to-all is no slower at sparsities\n" + table(
        ("figure", "than", "by table 2", "shared"),
        [(c.figure, NAMES[c.other], span(c.equation), span(c.shared)) for c in found], (0, 1, 2, 3),
    )  # fmt: skip


def _pairs(found: tuple[Speed, ...]) -> dict[tuple[str, str], list[Speed]]:
    pairs: dict[tuple[str, str], list[Speed]] = {}
    for s in found:
        pairs.setdefault((s.model, s.gpu), []).append(s)
    return pairs


def _figure7(found: tuple[Speed, ...]) -> str:
    pairs = _pairs(found)
    lines = []
    for m in MODELS:
        for gpu, (low, high) in zip(GPUS, m.speedups, strict=True):
            speeds = pairs.get((m.name, gpu.name))
            paper = f"{low:g} to {high:g}"
            if not speeds:
                lines.append(
                    (m.name, gpu.name, paper, *["-"] * len(WORKERS), "-", "not reproduced")
                )
                continue
            at = [s for s in speeds if s.utilisation == MIDDLE]
            every = [s.speedup for s in speeds]
            lines.append((m.name, gpu.name, paper, *(f"{s.speedup:.2f}" for s in at),
                          f"{min(every):.2f} to {max(every):.2f}",
                          " ".join(s.best.removeprefix("Horovod ") for s in at)))  # fmt: skip
    heads = ("", "", "paper", *(f"N={p}" for p in WORKERS), "range", "best")
    return table(heads, lines, (0, 1, len(heads) - 1))


def _figure8(found: tuple[Speed, ...]) -> str:
    lines = []
    for gpu in GPUS:
        speeds = [s for s in found if s.gpu == gpu.name and s.workers == WORKERS[-1]]
        low, high = STALLS[gpu.name]
        ratios = [s.stall_ratio for s in speeds if s.utilisation == MIDDLE]
        every = [s.stall_ratio for s in speeds]
        lines.append((gpu.name, "all", f"{low:g} to {high:g}",
                      f"{min(ratios):.2f} to {max(ratios):.2f}",
                      f"{min(every):.2f} to {max(every):.2f}"))  # fmt: skip
        for (model, _), own in _pairs(tuple(speeds)).items():
            at = {s.utilisation: s.stall_ratio for s in own}
            lines.append((gpu.name, model, "-", f"{at[MIDDLE]:.2f}",
                          f"{min(at.values()):.2f} to {max(at.values()):.2f}"))  # fmt: skip
    heads = ("", "", "paper", f"ours at {MIDDLE:.0%}", "range")
    return table(heads, lines, (0, 1))
