"""The choice of a program: a schedule planned for measured times and a measured network."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch

from linkweave.collectives.calls.trace import CHOICE, Trace
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import (
    Communication,
    MeasuredStep,
    Network,
    Profile,
    Schedule,
    fit,
    plan,
)
from linkweave.collectives.overlap.choose import AUTO_LIMIT_S
from linkweave.collectives.overlap.clock import Clock
from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.measure import measured_pass, profile_of
from linkweave.collectives.overlap.policies import NAMED
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.program import (
    AFTER_BACKWARD,
    Program,
    StepRecord,
    program_of,
    timeline_of,
)
from linkweave.collectives.training.transport import Transport, parted
from linkweave.topology.text import counted

log = logging.getLogger("linkweave")

WARM_UP = 2
"""Steps before times are taken: the first ones allocate and compile."""
MEASURED = 5
"""Steps whose times are taken, each with one all-reduce after the backward pass."""
LEFT = (3, 2, 2, 2)
"""How many finalists of "auto" are left after each round but the last, which leaves one. They take
turns, as the speed of a machine drifts; the median of a finalist's turns counts."""
TRIED = 6
"""Steps of each whose records are taken in a round, without the first one's time."""
FINALISTS = 5
"""How many schedules are tried at most."""
SETTLED_NAMED = 1 + WARM_UP + MEASURED + 1 + TRIED
"""Steps after which a policy given by its name has planned for the second time."""
SETTLED = SETTLED_NAMED + (FINALISTS + sum(LEFT)) * TRIED
"""Steps after which "auto" has chosen among its finalists, at the latest."""

TURNS = 3
"""How often steps are taken again of which a rank has no record."""

Steps = Generator[None, StepRecord | None, list[StepRecord]]

_Recorded = tuple[Schedule, StepRecord, Program, Clock]


class _Unmeasured(Exception):
    """Ranks have no records of the same steps."""


class Tuner:
    """Gives an engine its program. All ranks call `before_step` in each backward pass that sends.

    `schedule` is a Schedule, which is carried out from the first step on; the name of a policy,
    which plans once the times of some steps are known, and again with the times that the backward
    pass takes beside the communication so planned; or "auto". For "auto", the finalists then take
    turns, and the fastest stays, because computation and communication that share a processor slow
    each other down, each schedule in its own way. Rank 0 plans with the largest times of all ranks,
    and all ranks carry out the same. Moments of steps are taken down until then, and no longer.
    """

    def __init__(
        self, schedule: str | Schedule, engine: Engine, chains: bool, trace: Trace
    ) -> None:
        self._engine, self._chains = engine, chains and not engine.exchange.whole
        self._trace = trace
        self._last: StepRecord | None = None
        self._tried: list[tuple[Schedule, float]] = []  # finalists and the seconds of their steps
        self.schedule: Schedule | None = None
        """What is carried out, with its predictions; None while times are being measured."""
        self._before: _Recorded | None = None  # of the schedule before this one
        self._going: Generator[None, StepRecord | None, None] | None = None
        if isinstance(schedule, Schedule):
            self._adopt(self._suited(schedule))
        elif engine.exchange.whole and schedule not in ("auto", *SPARSE):
            raise CollectiveError(
                f"GTopK sends layers whole, with their neighbours: schedule must be auto or one of "
                f"{', '.join(SPARSE)}, not {schedule}"
            )
        else:
            self._going = self._life(schedule)
            engine.record_steps("tuner", True)
            next(self._going)

    def before_step(self) -> None:
        """With each backward pass that sends, whatever this rank has taken down of the last one."""
        if self._going is None:
            return
        last = self._engine.moments.last
        record, self._last = None if last is self._last else last, last
        try:
            self._going.send(record)
        except StopIteration:
            self._end()
        except _Unmeasured:
            log.warning("the times of steps cannot be taken, so planning ends: %s stays",
                        self._engine.program.policy)  # fmt: skip
            self._end()

    def _end(self) -> None:
        self._going = None
        self._engine.record_steps("tuner", False)

    # ---- what happens over the steps ---------------------------------------------------------
    def _life(self, name: str) -> Generator[None, StepRecord | None, None]:
        """Measure, plan, measure, plan, try, and let the best be carried out."""
        records = yield from self._steps(MEASURED, 1 + WARM_UP)
        profile, network = self._measured(records)
        usually = max(0.0, self._late(after_backward(profile, network), records))
        self._adopt(self._planned(name, profile, network, 0.0, 1)[0])
        records = yield from self._steps(TRIED - 1, 1)
        profile = _beside(profile, self._slowest(_profile(self._engine, records)))
        assert self.schedule is not None
        late = self._late(replace(self.schedule, profile=profile), records) - usually
        cost = max(0.0, late / len(self.schedule.communications))
        tried = self._planned(name, profile, network, cost, FINALISTS)
        best = tried[0]
        if len(tried) > 1:
            best = yield from self._trial(tried)
        self._adopt(best)
        if name == "auto" and self._engine.transport.rank == 0:
            self._tell(best, profile, network)

    def _tell(self, best: Schedule, profile: Profile, network: Network) -> None:
        """Log what "auto" keeps and gains over DDP's buckets, and what chaining would save."""
        ddp = plan(profile, network, "ddp").predicted_seconds
        mine = next((seconds for one, seconds in self._tried if one is best), None)
        theirs = next((seconds for one, seconds in self._tried if one.policy == "ddp"), None)
        measured = f", {theirs / mine:.2f} times by measurement" if mine and theirs else ""
        self._say(
            f"auto keeps {_in_words(best)}: {best.predicted_seconds:.4g} s a step predicted; DDP's "
            f"buckets take {ddp / best.predicted_seconds:.2f} times as long by prediction{measured}"
        )
        if not (self._chains or self._engine.exchange.whole or self._engine.fault_of_chaining()):
            saved = (
                best.predicted_seconds
                - plan(profile, network, "auto", limit_s=0.3).predicted_seconds
            )
            if saved > 0:
                self._say(
                    "chained=True would let steps go on beside the next forward pass: it is "
                    f"predicted to save {saved:.3g} s of a step, if nothing but the model's own "
                    "modules reads parameters between step() and that pass"
                )

    def _say(self, text: str) -> None:
        """Log a decision, which LINKWEAVE_DEBUG prints as well."""
        log.info(text)
        self._trace.say(CHOICE, text)

    def _steps(self, count: int, first: int) -> Steps:
        """The records of the next steps but the `first` ones. All ranks take the same steps; if one
        of them has not taken all down, all take others."""
        for _ in range(TURNS):
            found: list[StepRecord | None] = []
            for _ in range(first + count):
                found.append((yield))
            records = [record for record in found[first:] if record is not None]
            whole = b"1" if len(records) == count else b"0"
            if set(self._engine.transport.share(whole)) == {b"1"}:
                return records
        raise _Unmeasured

    def _trial(self, tried: list[Schedule]) -> Generator[None, StepRecord | None, Schedule]:
        """The finalist with the shortest steps."""
        times: list[list[float]] = [[] for _ in tried]
        left = list(range(len(tried)))
        for count in (*LEFT, 1):
            for number in left:
                self._adopt(tried[number])
                records = yield from self._steps(TRIED - 1, 1)
                times[number].append(self._pace(records))
            left = sorted(left, key=lambda number: median(times[number]))[:count]
        self._tried = [*zip(tried, map(median, times), strict=True)]
        if self._engine.transport.rank == 0:
            for one, seconds in self._tried:
                self._say(
                    f"auto tried {_in_words(one)}: {seconds:.4g} s a step, predicted "
                    f"{one.predicted_seconds:.4g}"
                )
        return tried[left[0]]

    def _pace(self, records: list[StepRecord]) -> float:
        """The mean seconds of a step in a turn, over all ranks; the same on all ranks.

        Ranks keep pace in the long run, but those of a chained program may be a part of a step
        apart, and others at a turn's end than at its begin. The slowest rank's time would count
        that as well.
        """
        whole = self._engine.moments.clock.seconds(records[0].begun, records[-1].begun)
        mine = json.dumps(whole / (len(records) - 1)).encode()
        return fmean(map(json.loads, self._engine.transport.share(mine)))

    # ---- planning ----------------------------------------------------------------------------
    def _measured(self, records: list[StepRecord]) -> tuple[Profile, Network]:
        """The profile with the slowest rank's times, and the network as rank 0 measured it."""
        engine = self._engine

        def measure(like: torch.Tensor, average: Average) -> Network:
            found = measure_network(engine.transport, like, average)
            told = engine.transport.share(json.dumps(asdict(found)).encode())[0]
            return Network(**json.loads(told))

        network = engine.exchange.network_of(measure)
        return self._slowest(_profile(engine, records)), network

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

    def _late(self, schedule: Schedule, records: list[StepRecord]) -> float:
        """By how many seconds these steps took longer than is predicted; the same on all ranks."""
        return self._pace(records) - schedule.predicted_seconds

    def _planned(
        self, name: str, profile: Profile, network: Network, cost: float, most: int
    ) -> list[Schedule]:
        """The schedule of a policy; for "auto" the first finalists, at most so many, without those
        that are carried out alike.

        Rank 0 plans, because a search that ends by time finds different things on each rank.
        """
        made: list[Schedule] = []
        if self._engine.transport.rank == 0:
            found: Iterable[Schedule]
            if name == "auto":
                sparse = self._engine.exchange.whole
                found = finalists(profile, network, cost, chains=self._chains, sparse=sparse)
            else:
                found = [plan(profile, network, name)]
            for suited in map(self._suited, islice(found, most)):
                one = replace(suited, network=network)
                if sent(one) not in map(sent, made):
                    made.append(one)
        planned = json.dumps([schedule.to_json() for schedule in made]).encode()
        told = self._engine.transport.share(planned)[0]
        return [Schedule.from_json(text) for text in json.loads(told)]

    def _suited(self, schedule: Schedule) -> Schedule:
        """The schedule as this model and this transport can carry it out."""
        engine = self._engine
        if not self._chains:
            return unchained(schedule)
        streams = engine.transport.streams(engine.units[0].device)
        return schedule if streams else unstreamed(schedule)

    @property
    def measured(self) -> MeasuredStep | None:
        """The last complete step that was recorded, of this schedule or the one before."""
        found = self._complete() or self._before
        return None if found is None else MeasuredStep(found[0], timeline_of(*found[1:]))

    def _complete(self) -> _Recorded | None:
        record, engine = self._engine.moments.last, self._engine
        if self.schedule is None or record is None or record.forward_end is None:
            return None
        return self.schedule, record, engine.program, engine.moments.clock

    def _adopt(self, schedule: Schedule) -> None:
        engine = self._engine
        program = program_of(schedule, engine.gradients.slots, [unit.name for unit in engine.units])
        _compare(engine.transport, program)
        if engine.exchange.whole:
            _check_whole(program)
        self._before = self._complete() or self._before
        engine.adopt(program)
        self.schedule = schedule


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
    clock, passes = engine.moments.clock, []
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
        profile, layers=tuple(replace(layer, backward_s=other.backward_s) for layer, other in pairs)
    )


SPARSE = tuple(name for name, policy in NAMED.items() if policy.whole)
"""The policies that send layers whole, with their neighbours."""
COST = 0.01
"""The least share of a step's computation that an all-reduce is taken to cost, for the schedules
with few."""
START_SHARE = 0.05
"""The share of a communication cut from a streamed one that its start-up and overhead may take."""


def finalists(
    profile: Profile, network: Network, cost: float = 0.0, *, chains: bool = True,
    sparse: bool = False,
) -> Iterator[Schedule]:  # fmt: skip
    """Yield up to FINALISTS schedules: the best with few all-reduces, the best with any number, the
    best with few that is not chained, DDP's, and one all-reduce after the backward pass.

    What an all-reduce takes from the computation is not known. Those with few are the best if it
    takes `cost` seconds, or the share COST if that is more, which is their network's overhead; the
    best with any number if it takes nothing. Without `chains` the first two are not chained, and
    the third is left out. `sparse`, which goes without `chains`: only policies that send layers
    whole. Takes up to about AUTO_LIMIT_S seconds.
    """
    cost = max(cost, COST * (profile.backward_s + profile.forward_s))
    costly = replace(network, overhead_s=cost)

    def few(schedule: Schedule) -> Schedule:
        note = f"planned as if each all-reduce took {cost * 1e3:.3g} ms of the computation"
        return replace(schedule, note=note)

    names = SPARSE if sparse else tuple(NAMED)
    if chains:
        yield few(plan(profile, costly, "auto", limit_s=AUTO_LIMIT_S / 2))
        yield plan(profile, network, "auto", limit_s=AUTO_LIMIT_S / 2)
    yield few(_best_unchained(profile, costly, names))
    if not chains:
        yield _best_unchained(profile, network, names)
    yield plan(profile, network, "ddp")
    yield after_backward(profile, network)


def _best_unchained(profile: Profile, network: Network, names: Sequence[str]) -> Schedule:
    made = [unchained(plan(profile, network, name)) for name in names]
    return min(made, key=lambda schedule: schedule.predicted_seconds)


def after_backward(profile: Profile, network: Network) -> Schedule:
    """All gradients in one all-reduce after the backward pass."""
    every = whole(profile, tuple(range(len(profile.layers))))
    return Schedule(AFTER_BACKWARD, profile, network, (every,))


def _in_words(schedule: Schedule) -> str:
    name = "a schedule of its own" if schedule.policy == "auto" else f"that of {schedule.policy}"
    sent = counted(len(schedule.communications), "all-reduce")
    return f"{name}, {'' if schedule.chained else 'not '}chained, {sent}"


def unchained(schedule: Schedule) -> Schedule:
    """The schedule with a next forward pass that waits for all, so that nothing is streamed."""
    sends = tuple(replace(c, streamed=False) for c in schedule.communications)
    return replace(schedule, communications=sends, chained=False)


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
        made += [replace(c, pieces=tuple(part), after=after, streamed=False) for part in parts]
    return replace(schedule, communications=tuple(made))


def sent(schedule: Schedule) -> Any:
    """Equal for schedules that are carried out alike."""
    sends = [
        (replace(c, pieces=()), c.pieces if c.streamed else sorted(map(astuple, c.pieces)))
        for c in schedule.communications
    ]
    return schedule.chained, sends


LARGEST = 64 << 20
"""Bytes of the largest all-reduce."""
ROUNDS = 3

Average = Callable[[int, torch.Tensor], None]
"""Averages a tensor over all ranks on a lane, in place; blocks."""


def measure_network(transport: Transport, like: torch.Tensor, average: Average) -> Network:
    """The start-up and the seconds a byte of averages of up to the bytes of `like`, and the
    slowdown of two at once; medians over a few rounds.

    All ranks must call it, while nothing is sent.
    """
    item = like.element_size()
    most = min(like.numel(), LARGEST // item)
    x = transport.empty(most, like.dtype, like.device).zero_()
    transport.open(2)
    sizes = sorted({min(most, n) for n in ((1 << 14) // item, most // 16, most // 4, most)} - {0})
    pairs = [(n * item, _median(partial(average, 0, x[:n]), x)) for n in sizes]
    if len(pairs) == 1:  # a few bytes: all of them are the start-up
        pairs.append((2 * pairs[0][0], pairs[0][1]))
    network = fit(pairs, transport.size).network
    half = most // 2
    both = _median(_at_once(average, x[:half], x[half : 2 * half]), x)
    alone = network.seconds_per_byte * half * item
    gamma = min(2.0, max(1.0, (both - network.startup_s) / alone)) if alone else 1.0
    return replace(network, gamma=gamma, name="measured")


def _at_once(average: Average, first: torch.Tensor, second: torch.Tensor) -> Callable[[], object]:
    """Averages on two lanes at once."""
    if first.device.type != "cuda":
        threads = ThreadPoolExecutor(1)

        def on_threads() -> None:
            other = threads.submit(average, 1, second)
            average(0, first)
            other.result()

        return on_threads

    stream = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]

    def on_streams() -> None:
        average(0, first)
        with torch.cuda.stream(stream):
            average(1, second)

    return on_streams


def _median(call: Callable[[], object], x: torch.Tensor) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        call()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begun)
    return median(times[1:])
