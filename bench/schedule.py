"""`linkweave schedule`: tables of schedules, and what they save of a step of DDP."""

from __future__ import annotations

import json
from collections.abc import Sequence

from linkweave.bench import options
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
