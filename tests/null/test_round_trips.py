"""Dependent memory accesses and fences on the critical path of the GPU plan interpreter.

Both are counted from the plans: an action waits for all its counters at once, loads up to three
operands at once (four of more), and raises its counters behind one fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from linkweave.collectives.planning.dataflow import passed_on
from linkweave.collectives.planning.plan import Op, Plan, Step, Track
from linkweave.collectives.planning.planner import plan_allreduce
from linkweave.collectives.runtime.gpu.launch_tables import Action, LaunchConfig, actions, fit
from linkweave.topology import load


class Cost(NamedTuple):
    """Dependent round trips to memory, and fences."""

    trips: int
    fences: int

    def __add__(self, other: tuple[int, ...]) -> Cost:  # type: ignore[override]
        return Cost(self.trips + other[0], self.fences + other[1])


class Unit(NamedTuple):
    """What a thread block does between a run of waits and a run of signals, and its cost."""

    waits: list[Step]
    signals: list[Step]
    before: Cost  # after the last wait is over, up to the first signal
    signalling: Cost


def at_once(plan: Plan, track: Track, phase: int, lines: bool) -> Iterator[Unit]:
    for action in actions(plan, track, phase):
        waits = [step for _, step in action.waits]
        signals = [step for _, step in action.signals]
        operands = _operands(action)
        loads = -(-operands // 3) if lines else max(operands > 0, -(-operands // 4))
        fenced = signals and not (lines and _relaxed(plan, track, action))
        polled = bool([s for s in waits if not lines or plan.sends_on(track, s.connections[0])])
        yield Unit(waits, signals, Cost(polled + loads, 0), Cost(0, bool(fenced)))


def _relaxed(plan: Plan, track: Track, action: Action) -> bool:
    """Whether lines need no fence: slots become free, and no partial sum stays."""
    if any(plan.connections[step.connections[0]].local for _, step in action.signals):
        return False
    if not action.move:
        return bool(action.send)
    at, step = action.move
    dropped = action.send and not passed_on(plan)[track.rank, track.channel, at]
    return step.op is Op.COPY or step.last or bool(dropped)


def _operands(action: Action) -> int:
    if not action.move:
        return bool(action.send)
    _, step = action.move
    return len(step.connections) + 1 if step.op is Op.REDUCE else 1


def critical_path(plan: Plan, config: LaunchConfig) -> Cost:
    """The largest cost of a chain of units, each of which needs the one before."""
    work, done = {}, {}
    for i, track in enumerate(plan.tracks):
        work[i] = deque(
            (unit, first)
            for phase in range(len(track.phases))
            for first in range(0, plan.num_chunks, plan.stride)
            for unit in at_once(plan, track, phase, config.low_latency)
        )
        done[i] = Cost(0, 0)
    raised: dict[tuple[int, bool], list[Cost]] = {}  # by connection and whether its sender did it
    waited: dict[tuple[int, bool], int] = {}
    moved = True
    while moved:
        moved = False
        for i, track in enumerate(plan.tracks):
            while work[i]:
                unit, first = work[i][0]
                now, used = done[i], []
                for step in unit.waits:
                    if first + step.chunk >= plan.num_chunks:
                        continue
                    sender = plan.sends_on(track, step.connections[0])
                    key = step.connections[0], not sender
                    number = waited.get(key, 0) - (plan.slots if sender else 0)
                    if number >= len(raised.get(key, [])):
                        break
                    used.append(key)
                    now = max(now, raised[key][number]) if number >= 0 else now
                else:
                    for key in used:
                        waited[key] = waited.get(key, 0) + 1
                    now = now + unit.before
                    for step in unit.signals:
                        if first + step.chunk < plan.num_chunks:
                            key = step.connections[0], plan.sends_on(track, step.connections[0])
                            raised.setdefault(key, []).append(now + unit.signalling)
                    done[i] = now + unit.signalling
                    work[i].popleft()
                    moved = True
                    continue
                break
    assert not any(work.values())
    return max(done.values())


@pytest.mark.parametrize(("machine", "algorithm", "nbytes", "now"), [
    ("dgx1-v100", "overlapped_double_tree", 8 << 10, Cost(13, 0)),
    ("dgx1-v100", "overlapped_double_tree", 1 << 20, Cost(22, 11)),
    ("dgx1-v100", "ring", 1 << 20, Cost(30, 15)),
    ("mesh-8", "one_shot", 8 << 10, Cost(5, 0)),
    ("mesh-8", "two_shot", 1 << 20, Cost(7, 3)),
])  # fmt: skip
def test_round_trips_of_a_call(machine: str, algorithm: str, nbytes: int, now: Cost) -> None:
    plan, config = fit(plan_allreduce(load(machine), nbytes, algorithm), nbytes, 4)
    assert critical_path(plan, config) == now
