"""What `linkweave reproduce` collects: a paper's values beside ours, and plots of them, as data.

A paper is reproduced in parts, each a function that returns a `Part`. Parts are kept as JSON, so
that a run can be resumed, and are rendered as a table or as a page of HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIMULATED = "simulated"
COMPUTED = "computed"
CPU_RANKS = "measured on CPU ranks"
NETWORK = "measured over namespaces"
CORE = "measured on one core"
GPU = "measured on a GPU"
DESIGN = "by design"
HOWS = (SIMULATED, COMPUTED, CPU_RANKS, NETWORK, CORE, GPU, DESIGN)
"""Where our values come from: plans or timelines in the simulator; closed forms; CPU processes;
processes on emulated hosts with a limited network; one process; a GPU; no run, as they follow from
how linkweave is made, which tests check."""


@dataclass(frozen=True, slots=True)
class Row:
    """One value of a paper.

    item: the table or figure, such as "figure 13". what: which value of it, in a few words.
    theirs, ours: numbers in `unit` ("" for ratios and counts), or text; `theirs` is None where the
        paper prints no value, `ours` None if it is not reproduced.
    how: how ours was found, which starts with one of HOWS; empty if it is not reproduced.
    reason: why they differ; what would be needed, if it is not reproduced. Raises ValueError for a
        value without `how`, and for a missing one without a reason.
    """

    item: str
    what: str
    theirs: float | str | None
    ours: float | str | None
    how: str = ""
    unit: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.ours is None and (self.how or not self.reason):
            raise ValueError(f"{self.item}, {self.what}: say what would be needed, not how")
        if self.ours is not None and not self.how.startswith(HOWS):
            raise ValueError(f"{self.item}, {self.what}: {self.how!r} is none of {HOWS}")

    @property
    def difference(self) -> str:
        """Ours less theirs: points of percent where the unit is %, else a share of theirs."""
        if isinstance(self.theirs, str | None) or isinstance(self.ours, str | None):
            return ""
        if self.unit == "%":
            return f"{self.ours - self.theirs:+.1f} points"
        return f"{round(100 * (self.ours / self.theirs - 1)) + 0:+d}%" if self.theirs else ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line, a group of bars or a cloud of points: x may be names."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure. kind: "line", "bar" or "scatter"; log: which axes are logarithmic, of "xy";
    level: where to draw a horizontal line; diagonal: draw x = y."""

    title: str
    caption: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: str = "line"
    log: str = ""
    level: float | None = None
    diagonal: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and plots of a part of a paper, and notes that hold for all of them."""

    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()


Make = Callable[[], Part]


def part_from(data: Any) -> Part:
    """The part whose `dataclasses.asdict` gave `data`, possibly by way of JSON."""
    plots = (
        Plot(**{
            **plot,
            "series": tuple(
                Series(s["name"], tuple(s["x"]), tuple(s["y"])) for s in plot["series"]
            ),
        })
        for plot in data["plots"]
    )  # fmt: skip
    return Part(tuple(Row(**row) for row in data["rows"]), tuple(plots), tuple(data["notes"]))


def mean(values: Any) -> float:
    """The arithmetic mean."""
    found = list(values)
    return sum(found) / len(found)
