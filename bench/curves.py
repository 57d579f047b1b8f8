"""The picture of `linkweave bench convergence`: curves of accuracy or loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from linkweave.bench.convergence import Row

FROM = 0.4  # of the steps: figures before them do not set the scale


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean over seeds of each exchange into a PNG file, shaded from the lowest to the
    highest seed, and dashed where what merges drop is kept.

    Exchanges that differ in nothing else have one colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = rows[0]
    words = first.predictions > 1
    unit = first.batch * first.predictions / 1e3 if words else 1.0
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    hues = cycle(f"C{i}" for i in range(10))
    colours = {"": "black"}
    shown: list[float] = []
    for row in rows:
        options = dict(row.gtopk or {})
        conserves = options.pop("conserve", False)
        if (kind := str(options or "")) not in colours:
            colours[kind] = next(hues)
        x = [unit * step for step, _ in row.points[0]]
        seeds = list(zip(*([y for _, y in one] for one in row.points), strict=True))
        middle = [sum(found) / len(found) for found in seeds]
        end = f"{row.mean:.3f}" if words else f"{row.mean:.2f} %"
        axis.plot(
            x, middle, color=colours[kind], linestyle="--" if conserves else "-",
            linewidth=1.6, label=f"{row.exchange}: {end}",
        )  # fmt: skip
        lows, highs = [min(found) for found in seeds], [max(found) for found in seeds]
        axis.fill_between(x, lows, highs, color=colours[kind], alpha=0.08, linewidth=0)
        shown += [y for at, y in zip(x, middle, strict=True) if at >= FROM * x[-1]]
    margin = 0.05 * (max(shown) - min(shown)) or 1.0
    axis.set_ylim(min(shown) - margin, max(shown) + margin)
    axis.set_xlim(0, unit * first.steps)
    axis.set_xlabel("thousands of words" if words else "steps")
    axis.set_ylabel("validation loss, nats a word" if words else "test accuracy, %")
    axis.grid(alpha=0.2)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    seeds_said = f", mean of {len(first.final)} seeds" if len(first.final) > 1 else ""
    axis.set_title(
        f"{first.task}, {first.ranks} ranks, {first.steps} steps of {first.batch} samples, "
        f"learning rate {first.rate:g}{seeds_said}",
        fontsize=10, loc="left",
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
