"""Lanes of the CPU: the end of their threads while an all-reduce is under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.exchange import Dense
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.lanes import HostLanes
from linkweave.collectives.training.program import Op, Program, Span


class Transport:
    """One rank. A stream's layers are final at once; it ends when `may_end` is set."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.may_end, self.waits = threading.Event(), threading.Event()

    def before_close(self, method: Any) -> None:
        pass

    def abort(self) -> None:
        raise AssertionError("nothing fails here")

    def average(self, lane: int, x: torch.Tensor) -> None:
        self.calls.append(lane)

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Transport:
        self.calls.append(lane)
        return self

    def dequeue(self, layer: int) -> None:
        pass

    def wait(self) -> None:
        self.waits.set()
        assert self.may_end.wait(60)


def test_lanes_that_end_send_nothing_twice() -> None:
    """All units have arrived and one lane is done, while the other's all-reduce still ends."""
    made = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    units = [Unit(f"m{i}", (f"p{i}",), (parameter,)) for i, parameter in enumerate(made)]
    gradients = GradientBuffers(units, lambda count, dtype, device: torch.zeros(count, dtype=dtype))
    spans = [
        Span(i, slot.first, slot.first + slot.nbytes) for i, slot in enumerate(gradients.slots)
    ]
    ops = (Op(0, (spans[0],)), Op(0, (spans[1],), lane=1, streamed=True))
    transport = Transport()
    program = Program("by hand", ops, ("m0", "m1"), chained=True)
    exchange = Dense(gradients, transport)  # type: ignore[arg-type]
    lanes: Any = HostLanes(transport, gradients, program, exchange, Embeddings())  # type: ignore[arg-type]
    lanes.begin()
    for unit in range(2):
        lanes.ready(unit)
    for unit in range(2):
        assert [*lanes.arrivals(unit)] == [gradients.slots[unit].nbytes]
    assert transport.waits.wait(60)
    ends = threading.Timer(0.2, transport.may_end.set)
    ends.start()
    lanes.close()
    ends.join()
    assert sorted(transport.calls) == [0, 1]


class Steps:
    """One rank, whose averages end one by one, as `may_end` says."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)

    def before_close(self, method: Any) -> None:
        pass

    def average(self, lane: int, x: torch.Tensor) -> None:
        assert self.may_end.acquire(timeout=60)


def test_a_unit_arrives_by_its_first_bytes() -> None:
    """Parts 1, 2, 0 and 3 of four arrive in this order; what counts begins with the first."""
    unit = Unit("m", ("p",), (nn.Parameter(torch.zeros(124)),))
    gradients = GradientBuffers(
        [unit], lambda count, dtype, device: torch.zeros(count, dtype=dtype)
    )
    ops = tuple(Op(0, (Span(0, 128 * part, 128 * part + 128),)) for part in (1, 2, 0, 3))
    transport = Steps()
    lanes: Any = HostLanes(
        transport,
        gradients,
        Program("by hand", ops, ("m",)),
        Dense(gradients, transport),  # type: ignore[arg-type]
        Embeddings(),
    )
    for _ in range(2):
        lanes.begin()
        lanes.ready(0)
        arrivals = lanes.arrivals(0)
        for _ in range(3):
            transport.may_end.release()
        assert next(arrivals) == 384
        transport.may_end.release()
        assert [*arrivals] == [512]
    lanes.close()
