"""What `linkweave reproduce` collects: a paper's values beside ours, and plots of them, as data.

A paper is reproduced in parts, each a function that returns a `Part`. Parts are kept as JSON, so
that a run can be resumed, and are rendered as a table or as a page of HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

NETWORK = "measured on hosts"
CPU_RANKS = "measured on CPU ranks"
SLEEPING = "measured on sleeping layers"
CORE = "measured on one core"
GPU = "measured on a GPU"
SIMULATED = "simulated"
COMPUTED = "computed"
DESIGN = "by design"
INPUT = "input"
HOWS = (NETWORK, CPU_RANKS, SLEEPING, CORE, GPU, SIMULATED, COMPUTED, DESIGN, INPUT)
"""Where our values come from: processes on emulated hosts with a limited network; CPU processes;
the same with layers that sleep and all-reduces on throttled lanes; one process; a GPU; plans or
timelines in the simulator; closed forms; no run, as they follow from how linkweave is made, which
tests check; the paper itself, as a definition or by what it gives, which reproduces nothing."""
OTHER = "other"  # the item of values that are not the paper's but somebody's beside it
_RANGE = re.compile(r"(-?[\d.]+) to (-?[\d.]+)")
_LIMIT = re.compile(r"(at most|below|at least|above) ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Row:
    """One value of a paper.

    item: the table or figure, such as "figure 13". what: which value of it, in a few words. A ratio
        "A over B" is a gain: 1.18 is 18 %.
    theirs, ours: numbers in `unit` ("" for ratios and counts), or text; `theirs` is None where the
        paper prints no value, `ours` None if it is not reproduced.
    how: how ours was found, which starts with one of HOWS; empty if it is not reproduced.
    reason: why they differ; what would be needed, if it is not reproduced. Raises ValueError for a
        value without `how`, and for a missing one without a reason.
    record: the file of bench/results that has ours.
    """

    item: str
    what: str
    theirs: float | str | None
    ours: float | str | None
    how: str = ""
    unit: str = ""
    reason: str = ""
    record: str = ""

    def __post_init__(self) -> None:
        if self.ours is None and (self.how or not self.reason):
            raise ValueError(f"{self.item}, {self.what}: say what would be needed, not how")
        if self.ours is not None and not self.how.startswith(HOWS):
            raise ValueError(f"{self.item}, {self.what}: {self.how!r} is none of {HOWS}")

    @property
    def counts(self) -> bool:
        """Whether this is a paper's value that ours could have missed."""
        return not (self.theirs is None or self.item == OTHER or self.how.startswith(INPUT))

    @property
    def apart(self) -> float | None:
        """Ours less theirs as a share of theirs, of gains where both are; None unless both are
        numbers."""
        if not isinstance(self.theirs, int | float) or not isinstance(self.ours, int | float):
            return None
        one = 1.0 if self._gains else 0.0
        theirs, ours = self.theirs - one, self.ours - one
        return ours / theirs - 1 if theirs else None

    @property
    def holds(self) -> bool | None:
        """Whether ours, a number or a range, lies in the range or within the limit that the paper
        has in words; None if it has neither."""
        if not isinstance(self.theirs, str) or self.ours is None:
            return None
        ours = _ends(self.ours)
        if ours and (limit := _LIMIT.fullmatch(self.theirs.split(" %")[0].strip())):
            most = float(limit[2])
            return max(ours) <= most if limit[1] in ("at most", "below") else min(ours) >= most
        if ours and (found := _RANGE.match(self.theirs)):
            return float(found[1]) <= min(ours) and max(ours) <= float(found[2])
        return None

    @property
    def difference(self) -> str:
        """Gains beside each other; points of percent where the unit is %; else ours less theirs as
        a share of theirs; of a range, whether ours lies in it."""
        if (holds := self.holds) is not None:
            return "within" if holds else "outside"
        if isinstance(self.theirs, str | None) or isinstance(self.ours, str | None):
            return ""
        if self.unit == "%":
            return f"{self.ours - self.theirs:+.1f} points"
        if self._gains:
            return f"gain {100 * (self.ours - 1):.0f} for {100 * (self.theirs - 1):.0f} %"
        return f"{round(100 * (self.ours / self.theirs - 1)) + 0:+d}%" if self.theirs else ""

    @property
    def _gains(self) -> bool:
        return not self.unit and " over " in self.what


def _ends(value: float | str) -> tuple[float, ...]:
    """The ends of a range in words, or a number; nothing of other words."""
    if not isinstance(value, str):
        return (float(value),)
    found = _RANGE.match(value)
    return (float(found[1]), float(found[2])) if found else ()


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
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()


Make = Callable[[], Part]
