"""The choice of a program: a schedule planned for measured times and a measured network."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import asdict, astuple, replace
from itertools import islice
from statistics import fmean, median
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Communication, Network, Profile, Schedule, plan
from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.passes import measured_pass, profile_of
from linkweave.collectives.overlap.policies import NAMED
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.measured_network import measure_network
from linkweave.collectives.training.program import Program, program_of
from linkweave.collectives.training.step_record import StepRecord
from linkweave.collectives.training.transport import Transport, parted

log = logging.getLogger("linkweave")

WARM_UP = 2
"""Steps before times are taken: the first ones allocate and compile."""
MEASURED = 5
"""Steps whose times are taken, each with one all-reduce after the backward pass."""
WORTH = 0.01
"""The share of a step's computation that each all-reduce of a plan of few is taken to cost; what it
really takes from the computation beside it is not known before it is tried."""
FINALISTS = 5
LEFT = (3, 2, 2, 2)
"""How many finalists of "auto" are left after each round in which they take turns, as the speed of
a machine drifts."""
TRIED = 6
"""Steps of each whose records are taken in a round, without the first one's time. The record of a
step comes one step later."""
SETTLED_NAMED = WARM_UP + MEASURED + 1 + TRIED + 1
"""Steps after which a policy given by its name has planned for the second time."""
SETTLED = SETTLED_NAMED + (FINALISTS + sum(LEFT)) * (TRIED + 1)
"""Steps after which "auto" has chosen among its finalists."""
CHECKED = 50
"""Steps between two looks at whether times have changed."""
DRIFT = 0.2
"""By how much the median step time may change until the program is planned anew."""
START_SHARE = 0.05
"""The share of a communication cut from a streamed one that its start-up and overhead may take."""

SPARSE = ("ddp", "wfbp", "mg-wfbp", "asc-wfbp")
"""The policies that send layers whole, with their neighbours."""

Steps = Generator[None, StepRecord, list[StepRecord]]


class Planner:
    """Gives an engine its program. All ranks call `before_pass` before each forward pass.

    `schedule` is a Schedule, which is carried out from the first step on; the name of a policy,
    which plans once the times of some steps are known, and again with the times that the backward
    pass takes beside the communication so planned; or "auto". For "auto", finalists then run by
    turns, and the fastest stays, because computation and communication that share a processor slow
    each other down, each schedule in its own way. They are the best predicted plan of few
    all-reduces, the best of all, the best that is not chained, DDP's, and one all-reduce after the
    backward pass. Rank 0 plans with the largest times of all ranks, and all ranks carry out the
    same.
    """

    def __init__(self, schedule: str | Schedule, engine: Engine, chains: bool) -> None:
        self._engine, self._chains = engine, chains and engine.sparse is None
        self._last: StepRecord | None = None
        self.schedule: Schedule | None = None
        """What is carried out, with its predictions; None while times are being measured."""
        if isinstance(schedule, Schedule):
            self._adopt(self._suited(schedule))
        elif engine.sparse and schedule not in ("auto", *SPARSE):
            raise CollectiveError(
                f"GTopK sends layers whole, with their neighbours: schedule must be auto or one of "
                f"{', '.join(SPARSE)}, not {schedule}"
            )
        self._going = None if isinstance(schedule, Schedule) else self._life(schedule)
        if self._going:
            next(self._going)

    def before_pass(self) -> None:
        record = self._engine.last_step
        if self._going and record is not None and record is not self._last:
            self._last = record
            self._going.send(record)

    # ---- what happens over the steps ---------------------------------------------------------
    def _life(self, name: str) -> Generator[None, StepRecord, None]:
        """Measure, plan, measure, plan, try, carry out; and again when times have changed."""
        while True:
            records = (yield from self._steps(WARM_UP + MEASURED))[WARM_UP:]
            profile, network = self._measured(records)
            self._adopt(self._planned(name, profile, network, 1)[0])
            records = (yield from self._steps(TRIED))[1:]
            profile = _beside(profile, self._slowest(_profile(self._engine, records)))
            finalists = self._planned(name, profile, network, FINALISTS)
            best, usual = finalists[0], 0.0
            if len(finalists) > 1:
                best, usual = yield from self._trial(finalists)
            self._adopt(best)
            yield from self._until_changed(usual)
            self.schedule = None
            self._engine.adopt(self._engine.first_program)

    def _steps(self, count: int) -> Steps:
        """The records of the next steps."""
        found = []
        for _ in range(count):
            found.append((yield))
        return found

    def _trial(
        self, finalists: list[Schedule]
    ) -> Generator[None, StepRecord, tuple[Schedule, float]]:
        """The finalist with the shortest steps, and their seconds."""
        times: list[list[float]] = [[] for _ in finalists]
        left = list(range(len(finalists)))
        for count in (*LEFT, 1):
            for number in left:
                self._adopt(finalists[number])
                records = yield from self._steps(TRIED)
                times[number] += self._paces([records[1:]])
            left = sorted(left, key=lambda number: median(times[number]))[:count]
        if self._engine.transport.rank == 0:
            for one, found in zip(finalists, times, strict=True):
                sends = len(one.communications)
                log.info("auto tried %s, %d all-reduces: %.4g s", one.policy, sends, median(found))
        return finalists[left[0]], median(times[left[0]])

    def _until_changed(self, usual: float) -> Generator[None, StepRecord, None]:
        """Go on until steps take DRIFT longer or shorter than is `usual`."""
        while True:
            records = yield from self._steps(CHECKED)
            parts = range(0, CHECKED - 1, TRIED)
            now = median(self._paces([records[first : first + TRIED] for first in parts]))
            usual = usual or now
            if abs(now / usual - 1) > DRIFT:
                return

    def _paces(self, turns: list[list[StepRecord]]) -> list[float]:
        """The mean seconds of a step in each turn, over its records and all ranks; the same on all
        ranks.

        Ranks keep pace in the long run, but those of a chained program may be a part of a step
        apart, and others at a turn's end than at its begin. The slowest rank's time would count
        that as well.
        """
        seconds = self._engine.clock.seconds
        mine = [seconds(turn[0].begun, turn[-1].begun) / (len(turn) - 1) for turn in turns]
        rows = self._engine.transport.share(json.dumps(mine).encode())
        return [fmean(same) for same in zip(*map(json.loads, rows), strict=True)]

    # ---- planning ----------------------------------------------------------------------------
    def _measured(self, records: list[StepRecord]) -> tuple[Profile, Network]:
        """The profile with the slowest rank's times, and the network as rank 0 measured it."""
        engine = self._engine
        engine.finish()
        largest = max(engine.arena.buffers, key=lambda buffer: buffer.nbytes)
        sparse = engine.sparse
        if sparse is None or sparse.spec.mode == "auto":
            network = measure_network(engine.transport, largest, engine.transport.average)
        if sparse:
            if sparse.spec.mode == "auto":  # modes must be chosen alike, so by one rank's times
                told = engine.transport.share(json.dumps(asdict(network)).encode())[0]
                sparse.average_of.network = Network(**json.loads(told))
            network = measure_network(engine.transport, largest, sparse.rehearse)
            sparse.rehearsed()
        told = engine.transport.share(json.dumps(asdict(network)).encode())[0]
        return self._slowest(_profile(engine, records)), Network(**json.loads(told))

    def _slowest(self, mine: Profile) -> Profile:
        """The profile with the largest times of all ranks, as all must have what is sent."""
        rows = self._engine.transport.share(json.dumps(mine.to_data()).encode())
        profiles = [Profile.from_data(json.loads(row)) for row in rows]
        layers = tuple(
            replace(
                same[0], forward_s=max(layer.forward_s for layer in same),
                backward_s=max(layer.backward_s for layer in same),
            )
            for same in zip(*(profile.layers for profile in profiles), strict=True)
        )  # fmt: skip
        return replace(mine, layers=layers)

    def _planned(self, name: str, profile: Profile, network: Network, most: int) -> list[Schedule]:
        """The first rivals, at most so many, without those that send alike.

        Rank 0 plans, because a search that ends by time finds different things on each rank.
        """
        made: list[Schedule] = []
        if self._engine.transport.rank == 0:
            for one in map(self._suited, islice(self._rivals(name, profile, network), most)):
                if _sent(one) not in map(_sent, made):
                    made.append(replace(one, network=network))
        planned = json.dumps([schedule.to_json() for schedule in made]).encode()
        told = self._engine.transport.share(planned)[0]
        return [Schedule.from_json(text) for text in json.loads(told)]

    def _rivals(self, name: str, profile: Profile, network: Network) -> Iterator[Schedule]:
        if name != "auto":
            yield plan(profile, network, name)
            return
        worth = WORTH * (profile.backward_s + profile.forward_s)
        costly = replace(network, overhead_s=network.overhead_s + worth)
        if not self._engine.sparse:
            yield plan(profile, costly, "auto")
            yield plan(profile, network, "auto")
        names = SPARSE if self._engine.sparse else NAMED
        unchained = [replace(plan(profile, costly, one), chained=False) for one in names]
        yield min(unchained, key=lambda schedule: schedule.predicted_seconds)
        yield plan(profile, network, "ddp")
        yield one_at_the_end(profile, network)

    def _suited(self, schedule: Schedule) -> Schedule:
        """The schedule as this model and this transport can carry it out."""
        engine = self._engine
        if not engine.transport.streams(engine.units[0].device):
            schedule = unstreamed(schedule)
        return schedule if self._chains else replace(schedule, chained=False)

    def _adopt(self, schedule: Schedule) -> None:
        engine = self._engine
        program = program_of(schedule, engine.arena.slots, [unit.name for unit in engine.units])
        _compare(engine.transport, program)
        if engine.sparse:
            _check_whole(program)
        engine.adopt(program)
        self.schedule = schedule


def one_at_the_end(profile: Profile, network: Network) -> Schedule:
    """All gradients in one all-reduce after the backward pass."""
    every = whole(profile, tuple(range(len(profile.layers))))
    return Schedule("at once", profile, network, (every,))


def _sent(schedule: Schedule) -> Any:
    """Equal for schedules that are carried out alike."""
    sends = [(sorted(map(astuple, c.pieces)), c.lane, c.after) for c in schedule.communications]
    streamed = schedule.chained and any(c.streamed for c in schedule.communications)
    return schedule.chained, streamed, sends


def _compare(transport: Transport, program: Program) -> None:
    """Raise CollectiveError on every rank unless all have this program."""
    if (other := parted(transport, program.checksum)) is not None:
        raise CollectiveError(f"ranks 0 and {other} have different schedules")


def _check_whole(program: Program) -> None:
    """Raise CollectiveError unless each op has units that follow one another, each in one op."""
    units = [unit for op in program.ops for unit in op.needs]
    if len(units) > len(set(units)) or any(len(op.runs) > 1 for op in program.ops):
        raise CollectiveError(
            f"GTopK sends layers whole, with their neighbours; schedule {program.policy} does not: "
            f"choose one of {', '.join(SPARSE)}"
        )


def _profile(engine: Engine, records: list[StepRecord]) -> Profile:
    clock, passes = engine.clock, []
    for record in records:
        begun, ended = record.step
        if begun is None:  # the optimizer's step was left out
            begun = ended = record.backward_end
        passes.append(
            measured_pass(
                clock, len(engine.units), ended, record.forward, record.forward_end, record.begun,
                record.ready, clock.seconds(begun, ended),
            )
        )  # fmt: skip
    names = [unit.name for unit in engine.units]
    return profile_of(names, [unit.nbytes for unit in engine.units], passes, "measured")


def _beside(profile: Profile, busy: Profile) -> Profile:
    """The profile with the backward pass of steps that sent gradients meanwhile."""
    pairs = zip(profile.layers, busy.layers, strict=True)
    return replace(
        profile,
        layers=tuple(replace(layer, backward_s=other.backward_s) for layer, other in pairs),
    )


def unstreamed(schedule: Schedule) -> Schedule:
    """The schedule with each streamed communication cut at its pieces into several.

    A part is as small as leaves its start-up a share of `START_SHARE`, and at least a piece.
    """
    network = schedule.network
    once = network.startup_s + network.overhead_s
    least = once / (START_SHARE * (network.seconds_per_byte or 1e-12))
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
