"""`linkweave schedule`: tables, charts and traces of gradient communication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linkweave.bench import options
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import Schedule

LEGEND = (
    "x DDP: DDP's time over its own; above bound: over the lower bound on any schedule; exposed: "
    "time of\ncommunication that no computation hides; lanes: all-reduces under way at once"
)
DDP = "DDP (25 MiB buckets)"
SEARCHED = ("optimal", "auto")
NEGLIGIBLE = 0.01
"""The share of a step up to which schedules are called equal."""


def table(schedules: Sequence[Schedule], ddp: Schedule) -> str:
    """One line for each schedule, and a legend; `ddp` is DDP's schedule for the same case."""
    base = ddp.predicted_seconds
    rows = [
        (s.policy, f"{s.predicted_seconds * 1e3:.2f}",
         f"{base / s.predicted_seconds if s.predicted_seconds else 1:.2f}", f"{s.gap:.1%}",
         f"{s.timeline.exposed_s * 1e3:.2f}", len(s.communications), s.lanes, s.note)
        for s in schedules
    ]  # fmt: skip
    heads = ("policy", "ms", "x DDP", "above bound", "exposed ms", "all-reduces", "lanes", "note")
    return f"{options.table(heads, rows, (0, 7))}\n{LEGEND}"


def verdict(schedules: Sequence[Schedule], ddp: Schedule) -> str:
    """Say in one sentence what the schedules save of a step of DDP.

    The best named policy speaks for all of them; a search is mentioned where it saves more, by
    NEGLIGIBLE or above. Where the lower bound leaves less than that to save, there is no gain.
    """
    base = ddp.predicted_seconds
    most = ddp.gap / (1 + ddp.gap)  # that the lower bound leaves to save
    bound = f"no schedule saves more than {_share(most)} of the {_ms(ddp)} ms that {DDP} takes"
    rivals = [s for s in schedules if s.policy != "ddp"]
    if most < NEGLIGIBLE:
        return f"nothing to gain: {bound}"
    if not rivals:
        return bound

    def saving(schedule: Schedule) -> float:
        return 1 - schedule.predicted_seconds / base

    named = [s for s in rivals if s.policy not in SEARCHED]
    best = max(named or rivals, key=saving)
    name = f"{best.policy}, the best named policy," if len(named) > 1 else best.policy
    if saving(best) >= NEGLIGIBLE:
        words = f"{name} saves {_share(saving(best))} of a step of {DDP}"
    elif saving(best) > -NEGLIGIBLE:
        words = f"{name} takes as long as {DDP}, within {_share(NEGLIGIBLE)}"
    else:
        words = f"{name} takes {_share(-saving(best))} longer than {DDP}"
    words += f": {_ms(best)} instead of {_ms(ddp)} ms"
    top = max(reversed(rivals), key=saving)  # auto before optimal, which is the same
    if saving(top) >= saving(best) + NEGLIGIBLE:
        words += f"; {top.policy} saves {_share(saving(top))}: {_ms(top)} ms"
    return words


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ms(schedule: Schedule) -> str:
    return f"{schedule.predicted_seconds * 1e3:.1f}"


def as_json(schedules: Sequence[Schedule], ddp: Schedule) -> str:
    """The verdict, and each schedule as `Schedule.to_json` writes it, with what is predicted."""
    rows = [
        {
            **s.to_data(), "predicted_seconds": s.predicted_seconds,
            "lower_bound_seconds": s.lower_bound_seconds,
        }
        for s in schedules
    ]  # fmt: skip
    return json.dumps({"verdict": verdict(schedules, ddp), "schedules": rows})


def draw(schedules: Sequence[Schedule], path: Path) -> None:
    """Draw a Gantt chart of the schedules into a PNG file.

    Each schedule has rows for the backward pass, its lanes and the forward pass; colours tell
    layers apart. A schedule that takes more than twice the median time is cut off. Raises
    CollectiveError for another suffix.
    """
    import matplotlib

    matplotlib.use("Agg")
    if path.suffix != ".png":
        raise CollectiveError(f"--png draws into a file that ends in .png, not {path}")
    from matplotlib import pyplot as plt
    from matplotlib.colors import Normalize

    rows = [2 + s.lanes for s in schedules]
    figure, axes = plt.subplots(
        len(schedules), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(12, 0.9 + sum(0.45 + 0.28 * n for n in rows)),
        gridspec_kw={"height_ratios": [1 + n for n in rows]},
    )  # fmt: skip
    count = len(schedules[0].profile.layers)
    colours, scale = matplotlib.colormaps["viridis"], Normalize(0, max(1, count - 1))
    times = sorted(s.predicted_seconds for s in schedules)
    limit = min(times[-1], 2 * times[len(times) // 2])  # a slow policy must not squeeze the others
    axes[0, 0].set_xlim(0, 1.02e3 * limit)
    for axis, s in zip(axes[:, 0], schedules, strict=True):
        names = ["backward", *(f"lane {i}" for i in range(s.lanes)), "forward"]
        line = s.timeline
        bars: list[list[tuple[float, float, float]]] = [[] for _ in names]
        for i, (start, end) in enumerate(line.backward):
            bars[0].append((start, end - start, i))
        for c, (start, end) in zip(s.communications, line.sends, strict=True):
            at, pace = start, (end - start) / c.nbytes
            for piece in c.pieces:
                bars[1 + c.lane].append((at, pace * piece.nbytes, piece.layer))
                at += pace * piece.nbytes
        for i, (start, end) in enumerate(line.forward):
            bars[-1].append((start, end - start, i))
        for row, of in enumerate(bars):
            axis.broken_barh(
                [(start * 1e3, width * 1e3) for start, width, _ in of], (row - 0.4, 0.8),
                facecolors=[colours(scale(i)) for _, _, i in of],
                edgecolor="none",
            )  # fmt: skip
        for c, (start, _) in zip(s.communications, line.sends, strict=True):
            if len(s.communications) < 200:  # mark the starts while they can be told apart
                axis.vlines(start * 1e3, 0.6 + c.lane, 1.4 + c.lane, color="white", linewidth=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.axvline(s.profile.backward_s * 1e3, color="0.5", linewidth=0.8, linestyle=":")
        axis.axvline(s.lower_bound_seconds * 1e3, color="crimson", linewidth=1.0)
        axis.set_title(
            f"{s.policy}: {s.predicted_seconds * 1e3:.1f} ms, {len(s.communications)} all-reduces, "
            f"{s.gap:.1%} above the bound (red)" + ", goes on" * (s.predicted_seconds > limit),
            fontsize=9, loc="left",
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms from the start of the backward pass")
    made = " (synthetic times)" if schedules[0].profile.synthetic else ""
    figure.suptitle(
        f"{schedules[0].profile.name}{made}, {schedules[0].network.name}, "
        f"{schedules[0].network.workers} workers", fontsize=11,
    )  # fmt: skip
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(scale, colours), ax=list(axes[:, 0]), fraction=0.02, pad=0.01
    )
    bar.set_label("layer, first to last", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def trace(schedule: Schedule) -> str:
    """Return the timeline as a Chrome trace (chrome://tracing, Perfetto)."""
    names = [layer.name for layer in schedule.profile.layers]
    line = schedule.timeline
    events: list[dict[str, Any]] = []

    def add(name: str, row: str, span: tuple[float, float], **extra: Any) -> None:
        events.append({
            "name": name, "ph": "X", "pid": schedule.policy, "tid": row, "ts": span[0] * 1e6,
            "dur": (span[1] - span[0]) * 1e6, "args": extra,
        })  # fmt: skip

    for name, span in zip(names, line.backward, strict=True):
        add(name, "backward", span)
    for number, (c, span) in enumerate(zip(schedule.communications, line.sends, strict=True)):
        what = names[c.pieces[0].layer] + ("..." if len(c.pieces) > 1 else "")
        add(what, f"lane {c.lane}", span, number=number, nbytes=c.nbytes, pieces=len(c.pieces))
    for name, span in zip(names, line.forward, strict=True):
        add(name, "forward", span)
    profile = schedule.profile
    about = {"profile": profile.name, "synthetic": profile.synthetic}
    return json.dumps({"traceEvents": events, "otherData": about})
