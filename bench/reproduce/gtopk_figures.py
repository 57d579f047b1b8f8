"""The picture of `linkweave simulate --gtopk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linkweave.bench.reproduce.gtopk import NUMEL, Breakdown, Collective, Rows, Step
from linkweave.bench.reproduce.gtopk_paper import METHODS, MODELS, WORKERS
from linkweave.bench.reproduce.gtopk_tables import NAMES

# Okabe and Ito's colours, which the colour-blind can tell apart
COLOURS = {"dense": "#0072B2", "topk": "#D55E00", "gtopk": "#009E73"}
MARKS = {"dense": "o", "topk": "s", "gtopk": "^"}
PARTS = (("compute", "#56B4E9", ""), ("compress", "#E69F00", "//"),
         ("communicate", "#999999", ".."))  # fmt: skip


def draw(found: Rows, path: Path) -> None:
    """Draw figures 9 to 11 into a PNG file: ours solid, the paper's dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(15, 9), layout="constrained")
    grid = figure.add_gridspec(2, 12)
    left, right, parts = (figure.add_subplot(grid[0, i : i + 4]) for i in (0, 4, 8))
    points = [c for c in found.figure9 if c.numel == NUMEL]
    _times(left, points, [c.workers for c in points])
    left.set(title="Figure 9, left: 100 MB, density 0.001", xlabel="workers")
    points = [c for c in found.figure9 if c.numel != NUMEL and c.workers == 32]
    _times(right, points, [c.numel >> 20 for c in points])
    right.set(title="Figure 9, right: 32 workers", xlabel="Mi elements of 4 bytes")
    left.legend(fontsize=8)
    _parts(parts, found.figure11)
    for i, model in enumerate(MODELS):
        axis = figure.add_subplot(grid[1, 3 * i : 3 * i + 3])
        _efficiency(axis, [s for s in found.figure10 if s.model == model.name])
        axis.set_title(f"Figure 10: {model.name}", fontsize=10)
        if not i:
            axis.set_ylabel("scaling efficiency")
            axis.legend(fontsize=8)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    figure.suptitle(
        "gTop-k on 1 Gbit/s Ethernet: equations 5 to 7 beside what the paper measured", fontsize=12
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _times(axis: Any, points: list[Collective], at: list[int]) -> None:
    for method in METHODS:
        axis.plot(at, [1e3 * getattr(c, method) for c in points], color=COLOURS[method],
                  marker=MARKS[method], label=f"{NAMES[method]}, equation")  # fmt: skip
    for method in METHODS[1:]:
        axis.plot(at, [1e3 * getattr(c, f"script_{method}") for c in points], color=COLOURS[method],
                  marker=MARKS[method], mfc="white", linestyle="--", linewidth=1,
                  label=f"{NAMES[method]}, the authors' script")  # fmt: skip
    planned = [(x, 1e3 * c.simulated) for x, c in zip(at, points, strict=True) if c.simulated]
    if planned:
        axis.plot(*zip(*planned, strict=True), color="black", marker="x", linestyle=":",
                  label="linkweave's tree, planned")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(at, [str(x) for x in at])
    axis.minorticks_off()
    axis.set_ylabel("ms")
    axis.grid(axis="y", alpha=0.3)


def _efficiency(axis: Any, steps: list[Step]) -> None:
    for method in METHODS:
        shown = [s for s in steps if s.method == method and s.workers > 1]
        at = [s.workers for s in shown]
        axis.plot(at, [s.efficiency for s in shown], color=COLOURS[method], marker=MARKS[method],
                  label=f"{NAMES[method]}, predicted")  # fmt: skip
        axis.plot(at, [s.measured_efficiency for s in shown], color=COLOURS[method],
                  marker=MARKS[method], mfc="white", linestyle="--",
                  label=f"{NAMES[method]}, measured")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(WORKERS[1:], [str(p) for p in WORKERS[1:]])
    axis.minorticks_off()
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.set_xlabel("workers")
    axis.grid(axis="y", alpha=0.3)


def _parts(axis: Any, found: tuple[Breakdown, ...]) -> None:
    """Pairs of bars, the paper's and ours, with shares of the paper's step."""
    bars = []
    for i, b in enumerate(found):
        theirs = (b.measured_compute, b.measured_selection, b.measured_communication)
        ours = (b.compute, b.selection, b.communication)
        bars += [(3 * i, theirs, sum(theirs)), (3 * i + 1, ours, sum(theirs))]
    bottom = [0.0] * len(bars)
    for part, (name, colour, hatch) in enumerate(PARTS):
        shares = [seconds[part] / whole for _, seconds, whole in bars]
        axis.bar([at for at, _, _ in bars], shares, 0.9, bottom, color=colour, hatch=hatch,
                 edgecolor="white", label=name)  # fmt: skip
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for (at, seconds, _), top in zip(bars, bottom, strict=True):
        axis.text(at, top + 0.01, f"{sum(seconds):.2f} s", ha="center", fontsize=8)
    axis.set_xticks([at for at, _, _ in bars], ["paper", "ours"] * len(found), fontsize=8)
    for i, b in enumerate(found):
        axis.text(3 * i + 0.5, -0.1, b.model, ha="center", va="top", fontsize=9)
    axis.set_ylim(0, 1.25)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.set(title="Figure 11: a step of gTop-k on 32 workers", ylabel="of the paper's step")
    axis.legend(fontsize=8, ncols=3, loc="upper center")
