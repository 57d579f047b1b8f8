"""The EmbRace paper's tables and figures as rows beside ours (`embrace` computes them)."""

from __future__ import annotations

from linkweave.bench.reproduce import embrace
from linkweave.bench.reproduce.embrace_paper import GPUS, MODELS, STALLS
from linkweave.bench.reproduce.embrace_step import UTILISATIONS
from linkweave.bench.reproduce.measured import Recorded, measured
from linkweave.bench.reproduce.rows import (
    COMPUTED,
    DESIGN,
    NETWORK,
    SIMULATED,
    Part,
    Plot,
    Row,
    Series,
)
from linkweave.collectives import overlap

LSTM = "embedding-131072-4-hosts-1gbit"
STEP = "the paper gives neither computation times nor reached bandwidths: half of the peak FLOP/s"
ZIPF = "Zipf tokens in place of the paper's texts, which it does not publish"
NOTES = ("figures 1 to 3, 5 and 6 are drawings",)


def tables() -> Part:
    """Tables 1 to 3 and figure 4."""
    found = embrace.rows()
    rows = []
    bert = overlap.model("bert-base")
    table = next(layer.nbytes for layer in bert.layers if "word_embeddings" in layer.name)
    rows += [
        Row("table 1", "BERT-base: share of embeddings", 21.42, 100 * table / bert.nbytes, COMPUTED,
            "%", "the word embedding of its published shapes"),
        Row("table 1", "LM, GNMT-8, Transformer: share of embeddings", "97.27, 34.16, 24.67 %",
            None, reason="needs the authors' models; we take these sizes from the table"),
    ]  # fmt: skip
    exact = [(o.exact, o.equation) for o in found.table2 if o.exact and o.gradient == "coalesced"
             and o.way == "alltoall"]  # fmt: skip
    rows.append(
        Row(
            "table 2",
            "all-to-all: our exact time over the equation, 4 to 16 workers",
            1.0,
            max(ours / theirs for ours, theirs in exact),
            COMPUTED,
            reason="with indices, counts and whole columns; the equation has none",
        )
    )
    for g in found.table3:
        if g.stream == "zipf":
            rows += [
                Row("table 3", f"{g.model}: coalescing saves", g.paper_coalescing, g.coalescing,
                    SIMULATED, "%", ZIPF),
                Row("table 3", f"{g.model}: priority saves of the rest", g.paper_priority,
                    g.priority, SIMULATED, "%", f"{ZIPF}; prior rows are those of all workers"),
            ]  # fmt: skip
    for crossing in found.crossings:
        span = crossing.equation
        words = "nowhere" if span is None else f"{100 * span[0]:.0f} to {100 * span[1]:.0f} %"
        rows.append(
            Row(
                f"figure {crossing.figure}",
                f"sparsity at which all-to-all is no slower than {crossing.other}",
                None,
                words,
                COMPUTED,
                reason="the paper draws curves without values",
            )
        )
    lines = {way: [p for p in found.figure4 if p.figure == "4a" and p.way == way]
             for way in dict.fromkeys(p.way for p in found.figure4)}  # fmt: skip
    plot = Plot(
        "EmbRace, figure 4a",
        "An embedding's gradient of 252.5 MB on 8 workers, table 2's equations.",
        "sparsity",
        "s",
        tuple(
            Series(way, tuple(p.sparsity for p in points), tuple(p.equation for p in points))
            for way, points in lines.items()
        ),
    )
    return Part(tuple(rows), (plot,), NOTES)


def training() -> Part:
    """Figures 7 to 11: speeds, stalls, what each half gains, scaling and convergence."""
    found = [s for s in embrace.rows().figure7 if s.utilisation == UTILISATIONS[1]]
    rows, bars = [], []
    for model in MODELS:
        for i, gpu in enumerate(GPUS):
            mine = [s for s in found if (s.model, s.gpu) == (model.name, gpu.name)]
            what = f"{model.name}, {gpu.name}: over the best baseline, most"
            most = model.speedups[i][1]
            if not mine:
                rows.append(Row("figure 7", what, most, None, reason="needs tables in host memory, "
                                "whose bandwidth the paper does not give"))  # fmt: skip
                continue
            best = max(s.speedup for s in mine)
            bars.append((f"{model.name} {gpu.name}", most, best))
            rows.append(Row("figure 7", what, most, best, SIMULATED, reason=STEP))
    for gpu, (_, most) in STALLS.items():
        ours = [s.stall_ratio for s in found if s.gpu == gpu and s.workers == 16]
        rows.append(Row("figure 8", f"{gpu}: stall of the best baseline over ours, most", most,
                        max(ours), SIMULATED, reason=STEP))  # fmt: skip

    def over(one: str, other: str) -> object:
        def ratio(found: Recorded) -> float:
            slow, fast = (found.row(embedding=name)["step_ms"] for name in (one, other))
            return 100 * (slow / fast - 1)

        return ratio

    rows += [
        measured("figure 9", "columns by all-to-all above all-gather", "1.5 to 14.6 % on 4 GPUs",
                 NETWORK, LSTM, over("DDP, sparse=True", "columns, FIFO"), "%",
                 "an LSTM; each all-to-all costs 10 to 40 ms of messages on two shared cores"),
        measured("figure 9", "2D scheduling above FIFO", "0.7 to 7.5 % on 4 GPUs", NETWORK, LSTM,
                 over("columns, FIFO", "columns, 2D"), "%", "an LSTM, 131,072 rows"),
        measured("figure 9", "columns, 2D, above a dense all-reduce", None, NETWORK, LSTM,
                 over("DDP, dense", "columns, 2D"), "%", "an LSTM, 131,072 rows"),
    ]  # fmt: skip
    for model, theirs in (("GNMT-8", 3.42), ("Transformer", 2.53), ("BERT-base", 3.94),
                          ("LM", 3.14)):  # fmt: skip
        few, many = (next(s for s in found if (s.model, s.gpu, s.workers) ==
                          (model, "RTX3090", n)) for n in (4, 16))  # fmt: skip
        rows.append(
            Row(
                "figure 10",
                f"{model}: speed of 16 over 4 RTX3090",
                theirs,
                4 * few.embrace / many.embrace,
                SIMULATED,
                reason=STEP,
            )
        )
    rows.append(
        Row(
            "figure 11",
            "convergence",
            "like Horovod's AllGather",
            "within 1e-12",
            f"{DESIGN}, a test",
            reason="parameters after 100 steps in float64, 1 to 8 "
            "ranks, as those of one process: tests/cpu/test_embedding_training.py",
        )
    )
    names = tuple(name for name, _, _ in bars)
    plot = Plot(
        "EmbRace, figure 7",
        "Speed-up over the best baseline, the most of 4 to 16 workers.",
        "model and GPU",
        "times",
        (
            Series("paper", names, tuple(p for _, p, _ in bars)),
            Series("predicted", names, tuple(o for _, _, o in bars)),
        ),
        "bar",
        level=1.0,
    )
    return Part(tuple(rows), (plot,))
