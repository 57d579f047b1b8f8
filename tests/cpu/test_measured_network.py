"""The measurement of a network by all-reduces of training."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from linkweave.collectives.training.measured_network import measure_network


class Sleeps:
    """A transport whose averages take a start-up and some seconds a byte."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def open(self, lanes: int) -> None:
        pass

    def average(self, lane: int, x: torch.Tensor) -> None:
        self.calls.append((lane, x.nbytes))
        time.sleep(4e-3 + 2e-8 * x.nbytes)


@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
def test_a_network_that_sleeps(count: int) -> None:
    transport: Any = Sleeps()
    network = measure_network(transport, torch.zeros(count), transport.average)
    # sleeps are never shorter, and on a busy machine longer
    assert 3.9e-3 < network.startup_s < 0.1
    assert network.overhead_s == 0
    if count > 1000:
        assert 1.5e-8 < network.seconds_per_byte < 1e-7
        assert 1 <= network.gamma < 1.5  # two sleep at once
