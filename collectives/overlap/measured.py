"""A training step as it was carried out, beside the prediction of its schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.profile import MAX_NUMBER
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.collectives.overlap.timeline import Interval, StepTimeline
from linkweave.topology.checks import number, read_format, shown

_FORMAT = "linkweave-step"


@dataclass(frozen=True)
class MeasuredStep:
    """The times of a rank's step: the same as the prediction's, `schedule.timeline`."""

    schedule: Schedule
    timeline: StepTimeline

    def __str__(self) -> str:
        lines = [f"{self.schedule.policy + ', ms':28}{'predicted':>10}{'measured':>10}"]

        def row(name: str, value: Callable[[StepTimeline], float]) -> None:
            lines.append(f"{name:28}")
            for line in (self.schedule.timeline, self.timeline):
                lines[-1] += f"{round(1e3 * value(line), 2) + 0.0:10.2f}"  # not -0.00

        row("step", lambda line: line.seconds)
        row("backward pass", lambda line: _total(line.backward))
        row("communication nothing hides", _exposed)
        if self.schedule.chained:
            row("update and forward pass", lambda line: _total(line.forward))
            row("the loop's own", _rest)
        else:  # a predicted forward pass contains the update, where training measured it
            row("update, loop, forward pass", lambda line: _rest(line) + _total(line.forward))
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({
            "format": _FORMAT, "version": 1, "schedule": self.schedule.to_json(),
            "timeline": asdict(self.timeline),
        })  # fmt: skip

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text says that it is a step in JSON, right or not."""
        try:
            data = json.loads(text)
        except ValueError:
            return False
        return isinstance(data, dict) and data.get("format") == _FORMAT

    @staticmethod
    def from_json(text: str) -> MeasuredStep:
        """What `to_json` wrote. Raises CollectiveError for anything else."""
        data = read_format(text, _FORMAT, "step JSON", CollectiveError)
        try:
            schedule, line = Schedule.from_json(data["schedule"]), data["timeline"]
            layers = len(schedule.profile.layers)
            spans = {
                "sends": _spans(line["sends"], len(schedule.communications)),
                "backward": _spans(line["backward"], layers),
                "forward": _spans(line["forward"], layers),
            }
            seconds = number(line["seconds"], "seconds", 0, MAX_NUMBER)
            exposed = number(line["exposed_s"], "exposed_s", -MAX_NUMBER, MAX_NUMBER)
        except (KeyError, TypeError) as error:
            raise CollectiveError(f"step JSON lacks or garbles {error}") from None
        return MeasuredStep(schedule, StepTimeline(seconds, exposed, **spans))


def _exposed(line: StepTimeline) -> float:
    return line.communication_s - line.hidden_s


def _rest(line: StepTimeline) -> float:
    """What neither a pass nor communication takes."""
    return line.exposed_s - _exposed(line)


def _spans(rows: Any, count: int) -> tuple[Interval, ...]:
    if not isinstance(rows, list) or len(rows) != count:
        raise CollectiveError(f"step JSON: a list of {count} spans is needed")
    found = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise CollectiveError(f"step JSON: a span is a start and an end, not {shown(row)}")
        start, end = (number(x, "a moment", -MAX_NUMBER, MAX_NUMBER) for x in row)
        found.append((start, end))
    return tuple(found)


def _total(spans: tuple[Interval, ...]) -> float:
    return sum(end - start for start, end in spans)
