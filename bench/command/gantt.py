"""Gantt charts and Chrome traces of training steps, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linkweave.collectives.overlap import Communication, MeasuredStep, Schedule, StepTimeline
from linkweave.collectives.overlap.timeline import Interval
from linkweave.topology.text import counted

OTHER = -1
"""In place of a layer's number: what is no layer's."""


@dataclass(frozen=True)
class Chart:
    """A step under a schedule; `timeline` has its times, `words` say more about them, and `about`
    what they rest on."""

    name: str
    schedule: Schedule
    timeline: StepTimeline
    words: str
    about: str = ""

    @property
    def case(self) -> str:
        profile, network = self.schedule.profile, self.schedule.network
        made = " (synthetic times)" if profile.synthetic else ""
        what = dict.fromkeys((profile.name + made, network.name))
        if [*what] == ["measured"]:
            what = {"layers and network as measured": None}
        words = f"{', '.join(what)}, {network.workers} workers"
        return f"{words}; {self.about}" if self.about else words

    @property
    def rows(self) -> list[str]:
        return ["backward", *(f"lane {i}" for i in range(self.schedule.lanes)), "forward"]

    @property
    def title(self) -> str:
        count = self.schedule.all_reduces
        return (
            f"{self.name}: {self.timeline.seconds * 1e3:.1f} ms, "
            f"{counted(count, 'all-reduce')}, {self.words}"
        )


def predicted(schedule: Schedule, name: str = "") -> Chart:
    words = f"{schedule.gap:.1%} above the bound (red)"
    return Chart(name or schedule.policy, schedule, schedule.timeline, words)


def measured(schedule: Schedule, timeline: StepTimeline, name: str = "measured") -> Chart:
    error = timeline.seconds / schedule.predicted_seconds - 1
    return Chart(name, schedule, timeline, f"{error:+.1%} from the prediction")


def of_step(step: MeasuredStep) -> list[Chart]:
    """A step as predicted and as measured."""
    about = "the predicted forward pass contains the update, if training measured it"
    charts = [predicted(step.schedule, "predicted"), measured(step.schedule, step.timeline)]
    return [replace(chart, about="" if step.schedule.chained else about) for chart in charts]


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts, one below the other, into a PNG file.

    Each has rows for the backward pass, its lanes and the forward pass; colours tell layers apart,
    and the time before the forward pass that neither a pass nor communication takes is grey.
    A step that takes more than twice the median time is cut off.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    rows = [2 + chart.schedule.lanes for chart in charts]
    figure, axes = plt.subplots(
        len(charts), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(12, 0.9 + sum(0.45 + 0.28 * n for n in rows)),
        gridspec_kw={"height_ratios": [1 + n for n in rows]},
    )  # fmt: skip
    first = charts[0].schedule
    colours = matplotlib.colormaps["viridis"]
    scale = Normalize(0, max(1, len(first.profile.layers) - 1))
    times = sorted(chart.timeline.seconds for chart in charts)
    limit = min(times[-1], 2 * times[len(times) // 2])  # a slow one must not squeeze the others
    axes[0, 0].set_xlim(0, 1.02e3 * limit)
    for axis, chart in zip(axes[:, 0], charts, strict=True):
        names = chart.rows
        for row, bars in enumerate(_bars(chart)):
            axis.broken_barh(
                [(start * 1e3, width * 1e3) for start, width, _ in bars], (row - 0.4, 0.8),
                facecolors=["0.8" if layer == OTHER else colours(scale(layer))
                            for _, _, layer in bars], edgecolor="none",
            )  # fmt: skip
        sends = chart.schedule.communications
        for c, (start, _) in zip(sends, chart.timeline.sends, strict=True):
            if len(sends) < 200:  # mark the starts while they can be told apart
                axis.vlines(start * 1e3, 0.6 + c.lane, 1.4 + c.lane, color="white", linewidth=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.4, -0.6)
        backward_end = max(end for _, end in chart.timeline.backward)
        axis.axvline(backward_end * 1e3, color="0.5", linewidth=0.8, linestyle=":")
        axis.axvline(chart.schedule.lower_bound_seconds * 1e3, color="crimson", linewidth=1.0)
        longer = ", goes on" * (chart.timeline.seconds > limit)
        axis.set_title(chart.title + longer, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms from the start of the backward pass")
    figure.suptitle(charts[0].case, fontsize=11)
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(scale, colours), ax=list(axes[:, 0]), fraction=0.02, pad=0.01,
        ticks=MaxNLocator(integer=True),
    )  # fmt: skip
    layers = [layer.name for layer in first.profile.layers]
    bar.ax.yaxis.set_major_formatter(lambda at, _: layers[min(round(at), len(layers) - 1)])
    bar.set_label("layer, first to last", fontsize=8)
    if any(_other(chart.timeline) for chart in charts):
        figure.text(0.01, 0.005, "grey: neither a pass nor communication", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(chart: Chart) -> list[list[tuple[float, float, int]]]:
    """(start, width, layer) of each bar, by row."""
    line, sends = chart.timeline, chart.schedule.communications
    bars: list[list[tuple[float, float, int]]] = [[] for _ in range(2 + chart.schedule.lanes)]
    for row, spans in ((0, line.backward), (-1, line.forward)):
        bars[row] = [(start, end - start, layer) for layer, (start, end) in enumerate(spans)]
    if (other := _other(line)) is not None:
        bars[-1].append((other[0], other[1] - other[0], OTHER))
    for c, (start, end) in zip(sends, line.sends, strict=True):
        bars[1 + c.lane] += [(at, to - at, layer) for at, to, layer in _pieces(c, start, end)]
    return bars


def _pieces(c: Communication, start: float, end: float) -> list[tuple[float, float, int]]:
    """(start, end, layer) of a communication's pieces, whose times are as their bytes."""
    found, at, pace = [], start, (end - start) / max(1, c.nbytes)
    for piece in c.pieces:
        found.append((at, at + pace * piece.nbytes, piece.layer))
        at += pace * piece.nbytes
    return found


def _other(line: StepTimeline) -> Interval | None:
    """The time before the forward pass that neither the backward pass nor communication takes."""
    end = min(start for start, _ in line.forward)
    before = [min(stop, end) for at, stop in (*line.backward, *line.sends) if at < end]
    start = max(before, default=end)
    return (start, end) if end - start > 1e-3 * line.seconds else None


def as_data(charts: Sequence[Chart]) -> dict[str, Any]:
    """The charts as a page's JSON has them: bars are (start, end, layer, words), of a piece of a
    communication also the start and end of that; times in us."""
    profile = charts[0].schedule.profile
    names = [f"layer {one.name}" if one.name.isdigit() else one.name for one in profile.layers]
    found = []
    for chart in charts:
        line = chart.timeline
        rows: list[list[tuple[float, float, int, str, *tuple[float, ...]]]] = [
            [] for _ in chart.rows
        ]
        for row, spans, what in ((0, line.backward, "backward"), (-1, line.forward, "forward")):
            rows[row] = [
                (_us(start), _us(end), layer, f"{names[layer]}, {what}")
                for layer, (start, end) in enumerate(spans)
            ]
        sends = zip(chart.schedule.communications, line.sends, strict=True)
        for number, (c, (start, end)) in enumerate(sends):
            layers = [piece.layer for piece in c.pieces]
            those = names[layers[0]] + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
            words = (
                f"{c.kind} {number} of {those}: {_size(c.nbytes)}, its gradients ready at "
                f"{max(line.backward[layer][1] for layer in layers) * 1e3:.2f} ms"
            )
            rows[1 + c.lane] += [
                (_us(at), _us(to), layer, words, _us(start), _us(end))
                for at, to, layer in _pieces(c, start, end)
            ]
        if (other := _other(line)) is not None:
            words = "update and " * (not chart.schedule.chained) + "the loop's own"
            rows[-1].append((_us(other[0]), _us(other[1]), OTHER, words))
        found.append({
            "title": chart.title, "name": chart.name, "case": chart.case, "us": _us(line.seconds),
            "bound": _us(chart.schedule.lower_bound_seconds),
            "rows": [{"name": name, "bars": sorted(bars)}
                     for name, bars in zip(chart.rows, rows, strict=True)],
        })  # fmt: skip
    return {"layers": len(names), "charts": found}


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e3:,.0f} kB" if nbytes >= 1e4 else f"{nbytes:,.0f} bytes"


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def trace(charts: Sequence[Chart]) -> str:
    """Return a Chrome trace (chrome://tracing, Perfetto) with a process for each chart, threads for
    the passes and lanes, and arrows from gradients that are ready to what sends them, and from
    there to the forward pass that needs the first of them."""
    profile = charts[0].schedule.profile
    events = [event for pid, chart in enumerate(charts) for event in _events(pid, chart)]
    about = {"profile": profile.name, "synthetic": profile.synthetic}
    return json.dumps({"traceEvents": events, "otherData": about})


def _events(pid: int, chart: Chart) -> Iterator[dict[str, Any]]:
    line, sends = chart.timeline, chart.schedule.communications
    names = [layer.name for layer in chart.schedule.profile.layers]
    rows = chart.rows
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": chart.name}}
    for tid, row in enumerate(rows):
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid,
               "args": {"sort_index": tid}}  # fmt: skip

    def bar(name: str, tid: int, span: Interval, **extra: Any) -> dict[str, Any]:
        return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": span[0] * 1e6,
                "dur": (span[1] - span[0]) * 1e6, "args": extra}  # fmt: skip

    def arrow(number: int, row: int, span: Interval, to: int, other: Interval) -> list[Any]:
        """From the middle of a bar to that of another one; from earlier, if that comes before."""
        end = sum(other) / 2
        return [
            {"name": "gradients", "cat": "gradients", "ph": ph, "id": f"{pid}.{number}",
             "pid": pid, "tid": tid, "ts": at * 1e6, "bp": "e"}
            for ph, tid, at in (("s", row, min(sum(span) / 2, end)), ("f", to, end))
        ]  # fmt: skip

    for row, spans in ((0, line.backward), (len(rows) - 1, line.forward)):
        for name, span in zip(names, spans, strict=True):
            yield bar(name, row, span)
    for number, (c, span) in enumerate(zip(sends, line.sends, strict=True)):
        layers = [piece.layer for piece in c.pieces]
        what = names[layers[0]] + ("..." if len(layers) > 1 else "")
        yield bar(what, 1 + c.lane, span, number=number, nbytes=c.nbytes, pieces=len(layers),
                  kind=c.kind)  # fmt: skip
        last = max(layers, key=lambda layer: line.backward[layer][1])
        yield from arrow(2 * number, 0, line.backward[last], 1 + c.lane, span)
        if c.final:
            needed = line.forward[min(layers)]
            yield from arrow(2 * number + 1, 1 + c.lane, span, len(rows) - 1, needed)
