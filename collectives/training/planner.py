"""The choice of a program: a schedule planned for measured times and a measured network."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import median
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Communication, Network, Profile, Schedule, plan
from linkweave.collectives.overlap.passes import Pass, profile_of
from linkweave.collectives.overlap.policies import NAMED
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.measured_network import measure_network
from linkweave.collectives.training.program import Program, program_of
from linkweave.collectives.training.step_record import StepRecord
from linkweave.collectives.training.transport import Transport

WARM_UP = 2
"""Steps before times are taken: the first ones allocate and compile."""
MEASURED = 5
"""Steps whose times are taken, each with one all-reduce after the backward pass."""
CHECKED = 50
"""Steps between two looks at whether times have changed."""
DRIFT = 0.2
"""By how much the median step time may change until the program is planned anew."""
OVERHEAD = 0.05
"""The share of a communication cut from a streamed one that its start-up may take."""


class Planner:
    """Gives an engine its program. All ranks call `before_pass` before each forward pass.

    `schedule` is a Schedule, which is carried out from the first step on; the name of a policy,
    which plans once the times of some steps are known; or "auto", the policy predicted to be the
    best. Rank 0 plans with the largest times of all ranks, and the others carry out the same.
    """

    def __init__(self, schedule: str | Schedule, engine: Engine, chains: bool) -> None:
        self._schedule, self._engine, self._chains = schedule, engine, chains
        self._steps = 0  # since the present program was adopted
        self._records: list[StepRecord] = []
        self._usual: float | None = None  # seconds of a step when the program was new
        self._last: StepRecord | None = None
        self.schedule: Schedule | None = None
        """What is carried out, with its predictions; None while times are being measured."""
        if isinstance(schedule, Schedule):
            self._adopt(schedule if chains else replace(schedule, chained=False))

    def before_pass(self) -> None:
        record = self._engine.last_step
        if record is self._last or record is None:
            return
        self._last = record
        self._steps += 1
        self._records.append(record)
        if isinstance(self._schedule, Schedule):
            self._records.clear()
        elif self.schedule is None:
            if self._steps == WARM_UP + MEASURED:
                self._plan(self._records[WARM_UP:])
        elif self._steps % CHECKED == 0:
            self._check()

    def _restart(self) -> None:
        self._steps, self._usual = 0, None
        self._records.clear()

    def _check(self) -> None:
        """Measure anew if a rank's steps take longer or shorter than when the program was new."""
        begun = [record.begun for record in self._records]
        times = [self._engine.clock.seconds(*pair) for pair in pairwise(begun)]
        self._records.clear()
        now = median(times)
        usual = self._usual = self._usual or now
        drifted = abs(now / usual - 1) > DRIFT
        answers = self._engine.transport.share(b"\1" if drifted else b"\0")
        if b"\1" in answers:
            self.schedule = None
            self._engine.adopt(self._engine.first_program)
            self._restart()

    def _plan(self, records: list[StepRecord]) -> None:
        engine = self._engine
        engine.finish()
        mine = _profile(engine, records)
        network = measure_network(
            engine.transport, max(engine.arena.buffers, key=lambda b: b.nbytes)
        )
        told = engine.transport.share(json.dumps([mine.to_data(), asdict(network)]).encode())
        planned = b""
        if engine.transport.rank == 0:
            rows = [json.loads(row) for row in told]
            profile = _slowest([Profile.from_data(row[0]) for row in rows])
            planned = self._planned(profile, network).to_json().encode()
        schedule = Schedule.from_json(engine.transport.share(planned)[0].decode())
        self._adopt(schedule)
        self._restart()

    def _planned(self, profile: Profile, network: Network) -> Schedule:
        name = str(self._schedule)
        if self._chains:
            made = [plan(profile, network, name)]
        else:
            names = NAMED if name == "auto" else [name]
            made = [replace(plan(profile, network, one), chained=False) for one in names]
        if not self._engine.transport.streams:
            made = [unstreamed(schedule) for schedule in made]
        return min(made, key=lambda schedule: schedule.predicted_seconds)

    def _adopt(self, schedule: Schedule) -> None:
        engine = self._engine
        program = program_of(schedule, engine.arena.slots, [unit.name for unit in engine.units])
        _compare(engine.transport, program)
        engine.adopt(program)
        self.schedule = schedule


def _compare(transport: Transport, program: Program) -> None:
    """Raise CollectiveError on every rank unless all have this program."""
    rows = transport.share(program.checksum.encode())
    if other := [rank for rank, row in enumerate(rows) if row != rows[0]]:
        raise CollectiveError(f"ranks 0 and {other[0]} have different schedules")


def _profile(engine: Engine, records: list[StepRecord]) -> Profile:
    seconds, units = engine.clock.seconds, range(len(engine.units))
    passes = []
    for record in records:
        begun, ended = record.step
        forward, at = [], 0.0
        for unit in units:
            if unit in record.forward:
                at = max(at, seconds(ended, record.forward[unit]))
            forward.append(at)
        forward.append(max(at, seconds(ended, record.forward_end)))
        ready = tuple(seconds(record.begun, record.ready[unit]) for unit in units)
        passes.append(Pass(tuple(forward), ready, seconds(begun, ended)))
    names = [unit.name for unit in engine.units]
    return profile_of(names, [unit.nbytes for unit in engine.units], passes, "measured")


def _slowest(profiles: list[Profile]) -> Profile:
    """The profile with the largest times: gradients are sent once all ranks have them."""
    layers = tuple(
        replace(
            same[0], forward_s=max(layer.forward_s for layer in same),
            backward_s=max(layer.backward_s for layer in same),
        )
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )  # fmt: skip
    return replace(profiles[0], layers=layers)


def unstreamed(schedule: Schedule) -> Schedule:
    """The schedule with each streamed communication cut at its pieces into several.

    A part is as small as leaves its start-up a share of `OVERHEAD`, and at least a piece.
    """
    network = schedule.network
    least = network.startup_s / (OVERHEAD * (network.seconds_per_byte or 1e-12))
    made: list[Communication] = []
    numbers: list[tuple[int, ...]] = []
    for c in schedule.communications:
        after = tuple(n for other in c.after for n in numbers[other])
        parts: list[list[Any]] = [[]]
        for piece in c.pieces:
            if c.streamed and parts[-1] and sum(p.nbytes for p in parts[-1]) >= least:
                parts.append([])
            parts[-1].append(piece)
        numbers.append(tuple(range(len(made), len(made) + len(parts))))
        made += [Communication(tuple(part), c.lane, after) for part in parts]
    return replace(schedule, communications=tuple(made))
