"""The measurement of a network by all-reduces of training."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from linkweave.collectives.training import tuner
from linkweave.collectives.training.tuner import measure_network

STARTUP, PACE, GAMMA = 4e-3, 2e-8, 1.25


class Clock(threading.local):
    """Each thread has a time of its own, so that two averages can take theirs at once."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A transport whose averages take a start-up and some seconds a byte: more for half of the
    `whole` bytes, which are sent on two lanes at once."""

    size = 2

    def __init__(self, clock: Clock, whole: int) -> None:
        self.calls: list[tuple[int, int]] = []
        self._clock, self._whole = clock, whole

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def open(self, lanes: int) -> None:
        pass

    def average(self, lane: int, x: torch.Tensor) -> None:
        self.calls.append((lane, x.nbytes))
        crowding = GAMMA if 2 * x.nbytes == self._whole else 1.0
        self._clock.now += STARTUP + PACE * crowding * x.nbytes


@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
def test_a_network_of_known_speed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(tuner, "time", clock)
    transport: Any = Timed(clock, 4 * count)
    network = measure_network(transport, torch.zeros(count), transport.average)
    assert network.startup_s == pytest.approx(STARTUP, rel=0.02)
    assert network.overhead_s == 0
    if count > 1000:
        assert network.startup_s == pytest.approx(STARTUP)
        assert network.seconds_per_byte == pytest.approx(PACE)
        assert network.gamma == pytest.approx(GAMMA)
        assert transport.calls.count((1, 2 * count)) == transport.calls.count((0, 2 * count)) > 0
