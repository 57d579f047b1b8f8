"""Lanes on CUDA streams, which are threads here: what is enqueued where, and in what order."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.gpu import GpuWork
from linkweave.collectives.distributed import works
from linkweave.collectives.distributed.works import GroupWork
from linkweave.collectives.overlap.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.exchange import Dense
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.lanes import StreamLanes
from linkweave.collectives.training.program import Op, Program, Span
from tests.cpu.stream_stand_in import CURRENT, Event, Stream, compute, stream  # noqa: F401

UNITS = 6


class Transport:
    """One rank; an "average" doubles its tensor in the current stream, and its halves the first
    and the second half of the elements."""

    rank, size = 0, 1

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.enqueued = chance, []
        self.aborted = False

    def empty(self, count: int, dtype: Any, device: Any) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def average(self, lane: int, x: torch.Tensor) -> None:
        self._double(lane, x)

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        self._double(lane, x[: x.numel() // 2])

    def gather(self, lane: int, x: torch.Tensor) -> None:
        self._double(lane, x[x.numel() // 2 :])

    def _double(self, lane: int, x: torch.Tensor) -> None:
        self.enqueued.append((lane, x.data_ptr()))
        pause = self.chance.uniform(0, 2e-3)

        def double() -> None:
            time.sleep(pause)
            x.mul_(2)

        CURRENT[-1].enqueue(double)

    def stream(self, lane: int, x: torch.Tensor, sizes: list[int]) -> Queue:
        return Queue(x, sizes)

    def before_close(self, method: Any) -> None:
        self.leave = method

    def abort(self) -> None:
        self.aborted = True


class Queue:
    """A gradient queue on a side stream: parts are doubled one after another."""

    def __init__(self, x: torch.Tensor, sizes: list[int]) -> None:
        self._side = Stream()
        self._side.wait_event(CURRENT[-1].record_event())
        self._events = []
        for part in x.split(sizes):
            self._side.enqueue(lambda part=part: (time.sleep(1e-3), part.mul_(2)))
            self._events.append(self._side.record_event())

    def dequeue(self, layer: int) -> None:
        CURRENT[-1].wait_event(self._events[layer])

    def wait(self) -> None:
        self.dequeue(-1)


def programs(chance: random.Random, gradients: GradientBuffers) -> Program:
    """Units in ops of one to three neighbours, on random lanes, after random earlier ops. Some are
    scattered, and gathered in the end."""
    ops: list[Op] = []
    unit = UNITS
    while unit:
        first = max(0, unit - chance.randint(1, 3))
        spans = []
        for u in range(first, unit):
            slot = gradients.slots[u]
            spans.append(Span(u, slot.first, slot.first + slot.nbytes))
        after = tuple(n for n in range(len(ops)) if chance.random() < 0.3)
        streamed = chance.random() < 0.4
        kind = REDUCE_SCATTER if not streamed and chance.random() < 0.5 else ALL_REDUCE
        ops.append(Op(0, tuple(spans), chance.randrange(3), after, streamed, 0, kind))
        unit = first
    for number, op in [*enumerate(ops)]:
        if op.kind == REDUCE_SCATTER:
            ops.append(Op(0, op.spans, chance.randrange(3), (number,), kind=ALL_GATHER))
    return Program("random", tuple(ops), tuple(map(str, range(UNITS))), True)


def of(gradients: GradientBuffers, unit: int, number: int = 0) -> torch.Tensor:
    return gradients._gradients[unit][number].part


def lanes_on(transport: Any, gradients: GradientBuffers, program: Program) -> StreamLanes:
    return StreamLanes(transport, gradients, program, Dense(gradients, transport), Embeddings())


def lanes_of_one_op(transport: Any, *sizes: int) -> tuple[StreamLanes, GradientBuffers]:
    """An op of one unit, whose parameters have so many elements."""
    parameters = tuple(nn.Parameter(torch.zeros(n)) for n in sizes)
    units = [Unit("a", ("w", "b")[: len(sizes)], parameters)]
    gradients = GradientBuffers(units, transport.empty)
    program = Program("one", (Op(0, (Span(0, 0, gradients.slots[0].nbytes),)),), ("a",))
    return lanes_on(transport, gradients, program), gradients


def computed(gradient: torch.Tensor, value: int, pause: float) -> None:
    time.sleep(pause)
    gradient.fill_(value)


def read(seen: list[tuple[int, bool]], unit: int, gradient: torch.Tensor, wanted: int) -> None:
    seen.append((unit, bool((gradient == wanted).all())))


@pytest.mark.parametrize("seed", range(8))
def test_ops_wait_for_gradients_and_units_for_their_ops(seed: int, compute: Stream) -> None:  # noqa: F811
    chance = random.Random(seed)
    units = [
        Unit(str(i), ("w",), (nn.Parameter(torch.zeros(chance.randint(1, 90))),))
        for i in range(UNITS)
    ]
    transport = Transport(chance)
    gradients = GradientBuffers(units, transport.empty)
    program = programs(chance, gradients)
    lanes = lanes_on(transport, gradients, program)
    seen: list[tuple[int, bool]] = []
    for step in range(3):
        lanes.begin(True)
        order = [*range(UNITS)]
        chance.shuffle(order)
        for u in order:
            compute.enqueue(partial(computed, of(gradients, u), step + 1, chance.uniform(0, 2e-3)))
            lanes.ready(u)
        for u in range(UNITS):
            assert [*lanes.arrivals(u)] == [gradients.slots[u].nbytes]
            compute.enqueue(partial(read, seen, u, of(gradients, u), 2 * (step + 1)))
    lanes.wait_all()
    compute.synchronize()
    assert seen == [(u, True) for _ in range(3) for u in range(UNITS)]
    assert [number for number, _, _ in lanes.sent] == [*range(len(program.ops))]
    plain = [op.lane for op in program.ops if not op.streamed]
    assert [lane for lane, _ in transport.enqueued] == 3 * plain
    clock = [lanes._clock.seconds(start, end) for _, start, end in lanes.sent]
    assert all(seconds >= 0 for seconds in clock)
    lanes.close()


def test_gradients_of_several_streams_and_a_late_exit(compute: Stream) -> None:  # noqa: F811
    """The bucket waits for a gradient that another stream makes; a rank that leaves waits until
    its own has been sent. Nothing is timed unless it is asked for."""
    transport = Transport(random.Random(0))
    lanes, gradients = lanes_of_one_op(transport, 4, 3)
    lanes.begin(False)
    other, held = Stream(), threading.Event()
    CURRENT.append(other)
    other.enqueue(lambda: held.wait(60))
    other.enqueue(partial(computed, of(gradients, 0, 1), 2, 0.0))
    lanes.accumulated(0)
    CURRENT.pop()
    compute.enqueue(partial(computed, of(gradients, 0), 1, 0.0))
    lanes.accumulated(0)
    lanes.collects(0)
    lanes.ready(0)
    late = compute.record_event()
    assert not late._passed.wait(0.1)
    held.set()
    transport.leave()()  # of the communicator, before it closes
    assert [one.part.tolist() for one in gradients._gradients[0]] == [[2.0] * 4, [4.0] * 3]
    assert lanes.sent == []
    lanes.wait_all()
    lanes.close()


def test_an_op_that_fails_ends_the_training_of_all_ranks(compute: Stream) -> None:  # noqa: F811
    transport = Transport(random.Random(0))
    lanes, _ = lanes_of_one_op(transport, 4)

    def average(lane: int, x: torch.Tensor) -> None:
        raise MemoryError("no memory for 64 bytes")

    transport.average = average  # type: ignore[method-assign]
    lanes.begin(False)
    with pytest.raises(
        CollectiveError, match="rank 0, all-reduce 0 of unit a: no memory for 64 bytes"
    ):
        lanes.ready(0)
    assert transport.aborted
    with pytest.raises(CollectiveError, match="no memory for 64 bytes"):
        lanes.wait_all()


def test_an_error_ends_all_calls(compute: Stream) -> None:  # noqa: F811
    transport = Transport(random.Random(0))
    lanes, _ = lanes_of_one_op(transport, 4)
    lanes.abort(CollectiveError("rank 0: over"))
    with pytest.raises(CollectiveError, match="rank 0: over"):
        next(lanes.arrivals(0))
    assert transport.aborted


class _Future:
    """torch's, of tensors on a GPU: whoever uses its value waits for an event."""

    def __init__(self, devices: Any) -> None:
        assert devices == ["cuda:0"]

    def set_result(self, result: Any) -> None:
        self.event = CURRENT[-1].record_event()


def test_a_future_keeps_no_stream_of_backward_waiting(
    compute: Stream,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in DistributedDataParallel, which asks for a bucket's future in the midst of backward."""
    monkeypatch.setattr(torch.futures, "Future", _Future)
    own, collective = Stream(), Event()
    held = threading.Event()
    own.enqueue(lambda: held.wait(60))
    collective.record(own)
    work = GpuWork.__new__(GpuWork)
    monkeypatch.setattr(work, "wait", lambda timeout: CURRENT[-1].wait_event(collective))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda of: nullcontext())
    aside = Stream()
    monkeypatch.setattr(works, "stream_of_futures", lambda device: aside)
    bucket, turned = (
        SimpleNamespace(is_cuda=True, device="cuda:0", is_contiguous=lambda is_so=is_so: is_so)
        for is_so in (True, False)
    )
    future: Any = GroupWork(work, [bucket]).get_future()
    compute.synchronize()  # backward goes on
    assert not future.event._passed.is_set()
    GroupWork(work, [turned]).get_future()  # whose end is a copy, in the current stream
    late = compute.record_event()
    assert not late._passed.is_set()
    both = works.together([GroupWork(work, [bucket])] * 2, [bucket])
    both.get_future()  # each of which may end by a copy
    held.set()
    future.event.synchronize()
    late.synchronize()


def test_a_result_that_one_stream_moves_is_waited_for_by_others(
    compute: Stream,  # noqa: F811
) -> None:
    held, moved = threading.Event(), threading.Event()
    work: Any = SimpleNamespace(wait=lambda timeout: None, done=lambda: True)
    out = SimpleNamespace(is_cuda=True, device="cuda:0")
    made = GroupWork(work, [out], lambda: CURRENT[-1].enqueue(moved.set))
    compute.enqueue(lambda: held.wait(60))
    assert made.is_completed()  # which moves it, in this stream
    other = Stream()
    seen: list[bool] = []
    with stream(other):
        made.wait()
    other.enqueue(lambda: seen.append(moved.is_set()))
    assert not seen
    held.set()
    other.synchronize()
    assert seen == [True]
