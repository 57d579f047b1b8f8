"""Programs: the collectives of a step over the buffers, in the order in which ranks issue them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Communication, Piece, Schedule, StepTimeline
from linkweave.collectives.overlap.clock import Clock
from linkweave.collectives.overlap.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from linkweave.collectives.overlap.timeline import Interval
from linkweave.collectives.training.gradient_buffers import Slot
from linkweave.topology.text import counted


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [first, stop) of a buffer, which belong to one unit."""

    unit: int
    first: int
    stop: int


@dataclass(frozen=True)
class Op:
    """One collective of the spans, which lie in one buffer.

    It starts once the units' gradients are there, the op before it on its lane has ended, and so
    have those numbered in `after`. `streamed`: spans become final one after another, in order.
    `kind`: one of `overlap.communication.KINDS`.
    """

    buffer: int
    spans: tuple[Span, ...]
    lane: int = 0
    after: tuple[int, ...] = ()
    streamed: bool = False
    source: int = 0
    """The communication of the schedule that it is, or is a part of."""
    kind: str = ALL_REDUCE

    @property
    def final(self) -> bool:
        """Whether it leaves averages on all ranks."""
        return self.kind != REDUCE_SCATTER

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """The units of the spans."""
        return tuple(dict.fromkeys(span.unit for span in self.spans))

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The spans as (first, stop), with those that follow one another joined."""
        found: list[tuple[int, int]] = []
        for span in self.spans:
            if found and found[-1][1] == span.first:
                found[-1] = found[-1][0], span.stop
            else:
                found.append((span.first, span.stop))
        return found

    def sizes(self, itemsize: int) -> list[int]:
        """The elements of each span."""
        return [(span.stop - span.first) // itemsize for span in self.spans]

    @property
    def nbytes(self) -> int:
        return sum(span.stop - span.first for span in self.spans)


def in_parts(op: Op, nbytes: int) -> Op:
    """The op with its spans cut to at most `nbytes` each, as they become final in parts."""
    spans = [
        Span(span.unit, at, min(at + nbytes, span.stop))
        for span in op.spans for at in range(span.first, span.stop, nbytes)
    ]  # fmt: skip
    return replace(op, spans=tuple(spans))


@dataclass(frozen=True)
class Program:
    """What each step sends, for units with these names. `chained`: a unit's next use waits for its
    own gradients only; else the backward pass ends when all have arrived."""

    policy: str
    ops: tuple[Op, ...]
    names: tuple[str, ...]
    chained: bool = False

    @property
    def lanes(self) -> int:
        return 1 + max(op.lane for op in self.ops)

    @cached_property
    def checksum(self) -> str:
        """Equal for equal programs, in every process."""
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()

    def label(self, number: int) -> str:
        """The units of an op, in a few words."""
        names = [self.names[unit] for unit in self.ops[number].needs]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"

    def __str__(self) -> str:
        where = "after" if self.policy == AFTER_BACKWARD else "beside"
        also = " and the next forward pass" * self.chained
        many = sum(op.kind != ALL_GATHER for op in self.ops)
        lines = [f"{self.policy}: {counted(many, 'all-reduce')} {where} the backward pass{also}"]
        for number, op in enumerate(self.ops):
            after = f" after {', '.join(map(str, op.after))}" if op.after else ""
            how = f"  {op.kind}" if op.kind != ALL_REDUCE else "  streamed" * op.streamed
            lines.append(
                f"{number:5} lane {op.lane} {op.nbytes:11} bytes  {self.label(number)}{after}{how}"
            )
        return "\n".join(lines)


def program_of(schedule: Schedule, slots: Sequence[Slot], names: Sequence[str]) -> Program:
    """The program of a schedule whose layers are the units in `slots`.

    A communication over several buffers becomes an op for each. Spans that are not streamed are
    sorted, so that neighbours are sent from where they lie. Raises CollectiveError if the schedule
    is for other units.
    """
    sizes = [layer.nbytes for layer in schedule.profile.layers]
    if sizes != [slot.nbytes for slot in slots]:
        raise CollectiveError(
            f"the schedule is for {len(sizes)} layers of {sum(sizes)} bytes; the model has "
            f"{len(slots)} units of {sum(slot.nbytes for slot in slots)} bytes, or divides them "
            "otherwise: plan for a profile by overlap.measure"
        )
    ops = _ops(schedule.communications, slots)
    return Program(schedule.policy, ops, tuple(names), schedule.chained)


AFTER_BACKWARD = "after-backward"
"""The name of a schedule, and of its program, that is no policy's."""


def after_backward(slots: Sequence[Slot], names: Sequence[str]) -> Program:
    """All gradients in one all-reduce after the backward pass."""
    pieces = tuple(Piece(unit, 0, slot.nbytes) for unit, slot in enumerate(slots))
    return Program(AFTER_BACKWARD, _ops([Communication(pieces)], slots), tuple(names))


def _ops(communications: Sequence[Communication], slots: Sequence[Slot]) -> tuple[Op, ...]:
    ops: list[Op] = []
    numbers: list[list[int]] = []  # of each communication
    for source, c in enumerate(communications):
        spans: dict[int, list[Span]] = {}
        for piece in c.pieces:
            slot = slots[piece.layer]
            first = slot.first + piece.first
            spans.setdefault(slot.buffer, []).append(Span(piece.layer, first, first + piece.nbytes))
        after = tuple(n for other in c.after for n in numbers[other])
        numbers.append([*range(len(ops), len(ops) + len(spans))])
        for buffer, found in spans.items():
            if not c.streamed:
                found.sort(key=lambda span: span.first)
            ops.append(Op(buffer, tuple(found), c.lane, after, c.streamed, source, c.kind))
    return tuple(ops)


@dataclass
class StepRecord:
    """Moments of the engine's clock; units and ops by number."""

    begun: Any = None
    """When the forward pass before the backward pass ended."""
    ready: dict[int, Any] = field(default_factory=dict)
    """When the last gradient of each unit was there."""
    backward_end: Any = None
    sent: list[tuple[int, Any, Any]] = field(default_factory=list)
    """(op, start, end), in the order of their ends."""
    step: tuple[Any, Any] = (None, None)
    """The call of the optimizer's `step`."""
    updates: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """The parts of a step that were carried out before the units' next use, each from when the last
    bytes of the unit arrived: what was updated until then took no time of its own."""
    reached: dict[int, Any] = field(default_factory=dict)
    """When the forward pass reached each unit's module."""
    forward: dict[int, Any] = field(default_factory=dict)
    """When it went on, with the unit's gradients there and its parameters updated."""
    forward_end: Any = None


def timeline_of(record: StepRecord, program: Program, clock: Clock) -> StepTimeline:
    """The times of a complete step, in seconds from the start of its backward pass.

    The parts of a communication that was divided between buffers count as one. An update before a
    unit's next use belongs to its forward pass, one by `step` to none.
    """

    def at(moment: Any) -> float:
        return clock.seconds(record.begun, moment)

    sends: dict[int, Interval] = {}
    for number, start, end in record.sent:
        source = program.ops[number].source
        known = sends.get(source, (at(start), at(end)))
        sends[source] = min(known[0], at(start)), max(known[1], at(end))
    units = range(len(program.names))
    backward, upto = [], 0.0
    for unit in reversed(units):
        until = max(upto, at(record.ready[unit]))
        backward.append((upto, until))
        upto = until
    forward, seconds = [], at(record.forward_end)
    upto = seconds
    for unit in reversed(units):
        begun = record.updates[unit][0] if unit in record.updates else record.forward.get(unit)
        start = upto if begun is None else min(upto, at(begun))
        forward.append((start, upto))
        upto = min(start, at(record.reached[unit])) if unit in record.reached else start
    computing = sum(end - start for start, end in (*backward, *forward))
    return StepTimeline(
        seconds, seconds - computing, tuple(span for _, span in sorted(sends.items())),
        tuple(reversed(backward)), tuple(reversed(forward)),
    )  # fmt: skip


class Moments:
    """Takes down the moments of steps, as long as the user or the tuner asks for it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.asking = clock, {"user": False, "tuner": False}
        self.record = StepRecord()
        self.last: StepRecord | None = None
        """Of the last complete step that was taken down."""
        self._arrived: Any = None  # when the last bytes of the unit last awaited arrived

    @property
    def on(self) -> bool:
        return any(self.asking.values())

    def forget(self) -> None:
        """The steps to come are those of another program."""
        self.record, self.last = StepRecord(self.record.forward_end or self.record.begun), None

    def forward_begins(self) -> None:
        self.record.reached.clear()
        self.record.forward.clear()

    def forward_ends(self) -> None:
        if self.on:
            self.record.forward_end = self.clock.now()

    def backward_enters(self) -> None:
        """A backward pass begins, maybe of a forward pass that nobody has noticed."""
        if self.on and self.record.forward_end is None:
            self.record.forward_end = self.clock.now()

    def next_step(self, sent: list[tuple[int, Any, Any]]) -> None:
        """The first gradient of a backward pass is there; `sent`: by the step before it."""
        done = self.record
        done.sent = sent
        complete = self.on and done.ready and done.begun is not None
        self.last = done if complete else self.last
        self.record = StepRecord(done.forward_end)

    def reached(self, unit: int) -> None:
        if self.on and torch.is_grad_enabled():  # evaluation has no record
            self.record.reached.setdefault(unit, self.clock.now())

    def goes_on(self, unit: int) -> None:
        if self.on and torch.is_grad_enabled():
            self.record.forward.setdefault(unit, self.clock.now())

    def arrived(self) -> None:
        if self.on:
            self._arrived = self.clock.now()

    def updated(self, unit: int) -> None:
        if self.on:
            self.record.updates[unit] = self._arrived, self.clock.now()

    def ready(self, unit: int) -> None:
        if self.on:
            self.record.ready[unit] = self.clock.now()

    def backward_ends(self) -> None:
        if self.on:
            self.record.backward_end = self.clock.now()

    def step_begins(self) -> Any:
        return self.clock.now() if self.on else None

    def step_ends(self, begun: Any) -> None:
        if begun is not None:
            self.record.step = begun, self.clock.now()
