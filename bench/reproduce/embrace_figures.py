"""The picture of `linkweave simulate --embrace`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linkweave.bench.reproduce.embrace import SPARSITIES, Gradient, Point, Rows, Speed
from linkweave.bench.reproduce.embrace_costs import WAYS
from linkweave.bench.reproduce.embrace_paper import GPUS, MODELS, STALLS, WORKERS
from linkweave.bench.reproduce.embrace_tables import MIDDLE, NAMES

# Okabe and Ito's colours, which the colour-blind can tell apart
COLOURS = {"alltoall": "#009E73", "allreduce": "#0072B2", "ps": "#CC79A7", "allgather": "#D55E00"}
MARKS = {"alltoall": "^", "allreduce": "o", "ps": "D", "allgather": "s"}
PAPER, OURS = "#BBBBBB", "#0072B2"
SHADES = {4: ("#56B4E9", "o"), 8: ("#E69F00", "s"), 16: ("black", "^")}


def draw(found: Rows, path: Path) -> None:
    """Draw figures 4, 7 and 8 and table 3 into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    for axis, name, what in ((axes[0, 0], "4a", "2 nodes x 4 GPUs"),
                             (axes[0, 1], "4b", "4 nodes x 1 GPU")):  # fmt: skip
        _sparsity(axis, [p for p in found.figure4 if p.figure == name])
        axis.set_title(f"Figure {name}: {what}, GNMT-8's 252.5 MB")
    axes[0, 0].axvline(40, color="grey", linestyle=":")
    axes[0, 0].text(39, 2.0, "the paper's\ncrossing, 40 %", ha="right", fontsize=8)
    axes[0, 0].legend(fontsize=8, loc="lower left")
    _sizes(axes[0, 2], found.table3)
    for axis, gpu in zip(axes[1], GPUS, strict=False):
        _speedups(axis, gpu.name, [s for s in found.figure7 if s.gpu == gpu.name])
    axes[1, 0].legend(fontsize=8)
    _stalls(axes[1, 2], [s for s in found.figure7 if s.workers == WORKERS[-1]])
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle("EmbRace on 100 Gbit/s InfiniBand: predicted, beside the paper", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sparsity(axis: Any, points: list[Point]) -> None:
    at = [100 * sparsity for sparsity in SPARSITIES]
    for way in WAYS:
        own = [p for p in points if p.way == way]
        axis.plot(at, [1e3 * p.equation for p in own], color=COLOURS[way], marker=MARKS[way],
                  label=f"{NAMES[way]}, table 2")  # fmt: skip
        if way == "alltoall" and own[0].shared > own[0].equation:
            axis.plot(at, [1e3 * p.shared for p in own], color=COLOURS[way], marker=MARKS[way],
                      mfc="white", linestyle="--",
                      label="all-to-all, adapter shared by the node")  # fmt: skip
    axis.set_yscale("log")
    axis.set(xlabel="sparsity, %", ylabel="ms", ylim=(0.2, 300))


def _sizes(axis: Any, found: tuple[Gradient, ...]) -> None:
    """For each model the coalesced and the prior gradient, the paper's beside ours."""
    ours = {g.model: g for g in found if g.stream == "zipf"}
    groups = (
        ("coalesced, paper", PAPER, "", [m.coalesced for m in MODELS]),
        ("coalesced, zipf", OURS, "", [ours[m.name].coalesced for m in MODELS]),
        ("prior, paper", PAPER, "//", [m.prioritized for m in MODELS]),
        ("prior, zipf, next batches of 16 workers", OURS, "//",
         [ours[m.name].prior for m in MODELS]),
        ("prior, zipf, own next batch", "#56B4E9", "//", [ours[m.name].own_prior for m in MODELS]),
    )  # fmt: skip
    for i, (label, colour, hatch, values) in enumerate(groups):
        bars = axis.bar([6 * m + i for m in range(len(MODELS))], values, 0.9, color=colour,
                        hatch=hatch, edgecolor="white", label=label)  # fmt: skip
        axis.bar_label(bars, fmt="%.1f", fontsize=6)
    axis.set_xticks([6 * m + 2 for m in range(len(MODELS))], [m.name for m in MODELS])
    axis.set(title="Table 3: embedding gradients of a worker", ylabel="MB", ylim=(0, 24))
    axis.legend(fontsize=8, loc="upper left")


def _speedups(axis: Any, gpu: str, speeds: list[Speed]) -> None:
    """The paper's range as a bar; ours at half of the peak, with lines over all shares of it."""
    number = [g.name for g in GPUS].index(gpu)
    for i, model in enumerate(MODELS):
        low, high = model.speedups[number]
        axis.bar(i - 0.3, high - low, 0.2, low, color=PAPER, label="" if i else "paper, range")
        for j, workers in enumerate(WORKERS):
            own = [s for s in speeds if (s.model, s.workers) == (model.name, workers)]
            if not own:
                continue
            colour, mark = SHADES[workers]
            ratios = [s.speedup for s in own]
            middle = next(s.speedup for s in own if s.utilisation == MIDDLE)
            x = i - 0.05 + 0.15 * j
            axis.vlines(x, min(ratios), max(ratios), color=colour, linewidth=1)
            axis.plot(x, middle, color=colour, marker=mark, linestyle="",
                      label="" if i else f"ours, {workers} GPUs")  # fmt: skip
        if not any(s.model == model.name for s in speeds):
            axis.text(i + 0.1, 1.02, "not\nreproduced", ha="center", fontsize=8)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(MODELS)), [m.name for m in MODELS])
    axis.set(title=f"Figure 7: {gpu}, 50 % of the peak (lines: 25 to 100 %)", ylim=(0.9, 2.5),
             ylabel="speed-up over the best baseline")  # fmt: skip


def _stalls(axis: Any, speeds: list[Speed]) -> None:
    x, ticks = 0, []
    for gpu in GPUS:
        low, high = STALLS[gpu.name]
        axis.bar(x, high - low, 0.5, low, color=PAPER, label="" if x else "paper, all models")
        ticks.append((x, "all"))
        for model in MODELS:
            own = {s.utilisation: s.stall_ratio for s in speeds
                   if (s.model, s.gpu) == (model.name, gpu.name)}  # fmt: skip
            if own:
                x += 1
                axis.vlines(x, min(own.values()), max(own.values()), color=OURS, linewidth=1)
                axis.plot(x, own[MIDDLE], color=OURS, marker="^", linestyle="",
                          label="ours" if len(ticks) == 1 else "")  # fmt: skip
                ticks.append((x, model.name))
        axis.text((ticks[-1][0] + x) / 2 - 1.5, 3.2, gpu.name, ha="center", fontsize=9)
        x += 2
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks([at for at, _ in ticks], [name for _, name in ticks], rotation=30, fontsize=8)
    axis.set(title="Figure 8: stalls on 16 GPUs, best baseline over EmbRace",
             ylabel="x EmbRace's stall", ylim=(0.9, 3.4))  # fmt: skip
    axis.legend(fontsize=8, loc=(0.2, 0.72))
