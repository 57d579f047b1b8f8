"""Reduce-scatters and all-gathers of training, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_distributed import run

from linkweave.bench.training.sleeping import Throttled
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.overlap import Network
from linkweave.collectives.training.transport import OverCommunicator, OverGroup, share_of

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16
SIZES = 0, 1, 2, 7, 64, 1009


def halved(transport: Any) -> bool:
    """Whether a scatter leaves averages in this rank's share, and a gather in the whole; integers,
    in tensors that begin at any element."""
    rank, size = transport.rank, transport.size
    transport.open(1)
    for dtype in DTYPES:
        for numel in SIZES:
            room = torch.zeros(numel + 3, dtype=dtype)
            x = room[1 : 1 + numel]
            elements = torch.arange(numel) % 3
            x.copy_(size * (elements + rank))  # sums and shares of which every dtype has
            want = (size * elements + size * (size - 1) // 2).to(dtype)
            transport.scatter(0, x)
            _, *mine = share_of(x, rank, size)
            _, *wanted = share_of(want, rank, size)
            assert all(map(torch.equal, mine, wanted)), (dtype, numel)
            transport.gather(0, x)
            assert torch.equal(x, want), (dtype, numel)
            assert room[0] == 0 and not room[1 + numel :].any()
    return True


@on_ranks(2, 3, 5, 7)
def test_halves_over_a_communicator(rank: int) -> None:
    transports = OverCommunicator(get_default()), Throttled(get_default(), Network(0.0, 0.0))
    assert all(map(halved, transports))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_halves_over_a_process_group(size: int) -> None:
    found = run(size, lambda _: halved(OverGroup(dist.group.WORLD)), backend="gloo")
    assert found == [True] * size
