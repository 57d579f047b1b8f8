"""Lanes, splits and channels: calls under way at once, in memory that all of them see."""

from __future__ import annotations

import gc
import os
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveAborted
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu.mapping import SEGMENT
from tests.cpu.helpers import error_of


@on_ranks(2, 3, 5)
def test_tensors_of_the_whole_are_not_staged_on_parts(rank: int) -> None:
    comm: Any = get_default()
    total = float(sum(range(comm.size)))
    x = comm.empty(200_000)
    found = []
    for part in [comm.split(), *comm.lanes(2)]:
        x[:] = rank
        part.allreduce(x, algorithm="two_shot")
        ready = next(reversed(part._calls._known.values()))
        found.append((float(x[-1]), ready.direct))
        y = part.empty(10, torch.float32)
        y[:] = rank
        comm.allreduce(y)
        found.append(float(y[0]))
    assert found == [(total, True), total] * 3


@on_ranks(2)
def test_a_short_call_does_not_wait_for_a_long_one_on_another_lane(rank: int) -> None:
    """How often 64 bytes are through on one lane while 64 MiB are on the other. In one of many
    tries, as the machine may be busy: behind it, it would be in none."""
    slow, fast = get_default().lanes(2)
    big, small = np.ones(1 << 24, np.float32), np.ones(16, np.float32)
    slow.allreduce(big)
    fast.allreduce(small)
    ahead = 0
    for _ in range(15):
        work = slow.allreduce(big, async_op=True)
        time.sleep(0.002)
        fast.allreduce(small)
        ahead += not work.done()
        work.wait()
    assert ahead


@on_ranks(2)
def test_lanes_compare_the_order_of_all_their_calls(rank: int) -> None:
    comm = get_default()
    first, second = comm.lanes(2)
    x = np.ones(4, np.float32)
    works = [lane.allreduce(x, async_op=True) for lane in ((first, second), (second, first))[rank]]
    said = [error_of(work.wait) for work in works]
    comm.barrier()
    assert all(re.search("as call [12] on lanes; ranks .* as call [12] on", s) for s in said)


@on_ranks(3)
def test_closed_parts_give_their_segments_back(rank: int) -> None:
    comm: Any = get_default()
    held = comm._arena.mapping.held
    before = held()
    comm.barrier()
    parts = comm.lanes(6) + [comm.split(rank % 2) for _ in range(3)]
    comm.barrier()
    most = held()
    comm.barrier()
    for part in parts:
        part.close()
    comm.barrier()
    assert [before, most, held()] == [1, 1 + 6 + 2 * 3, 1]


@on_ranks(2)
def test_memory_comes_back_at_once(rank: int) -> None:
    """Pages of the shared file, in MiB: with a tensor, without, with a part's plan, without."""
    comm: Any = get_default()
    found = []

    def measure() -> None:
        comm.barrier()
        found.append(pages())
        comm.barrier()

    measure()
    x = comm.empty(8 << 20)
    x[:] = 1
    measure()
    del x
    gc.collect()
    measure()
    with comm.split() as part:
        part.allreduce(np.ones(1 << 22, np.float32), algorithm="two_shot")
        measure()
    measure()
    _, tensors, none, plan, closed = [a - found[0] for a in found]
    assert 60 <= tensors <= 70 and none <= 4
    assert closed <= plan + 1 <= 8


def pages() -> int:
    """MiB of the ranks' shared file that are memory."""
    every = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    files = [fd for fd in every if "memfd:linkweave" in os.path.realpath(fd)]
    return max(os.stat(fd).st_blocks for fd in files) * 512 >> 20


@on_ranks(2)
def test_too_many_parts_are_refused_on_every_rank(rank: int) -> None:
    comm: Any = get_default()
    taken = comm._arena.mapping.take(4000 * SEGMENT) if rank == 0 else None
    said = error_of(comm.lanes, 64) + error_of(comm.lanes, 64 + 1)
    comm.barrier()
    if taken:
        comm._arena.mapping.give(*taken)
    comm.barrier()
    with comm.lanes(1)[0] as lane:
        lane.barrier()
    assert "close those that are not needed" not in said or "segments" in said
    assert "integer from 1 to 64, not 65" in said


@pytest.mark.parametrize(("size", "topology"), [(n, f"mesh-{n}") for n in (2, 3, 5)])
@on_ranks(params=["topology"])
def test_ranks_send_to_each_other(rank: int) -> None:
    comm = get_default()
    size = comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (0, 1, 7, 100_003):
        sent, got = np.full(n, rank, np.int32), np.zeros(n, np.int32)
        work = comm.send(sent, after, async_op=True)
        comm.recv(got, before)
        assert work is not None
        work.wait()
        assert (got == before).all()
    if rank == 0:
        for i in range(3):
            collectives.send(torch.full((2,), float(i)), size - 1)
    if rank == size - 1:
        x = torch.zeros(2)
        for i in range(3):
            collectives.recv(x, 0)
            assert x.tolist() == [float(i)] * 2
    comm.barrier()


@on_ranks(3)
def test_messages_that_do_not_fit(rank: int) -> None:
    comm = get_default()
    x = np.ones(4, np.float32)
    said = [
        error_of(comm.send, x, rank), error_of(comm.recv, x, 3), error_of(comm.send, x, "1"),
        error_of(comm.recv, x[:3], 0) if rank else error_of(comm.send, x, 1),
        error_of(comm.recv, [1], 0) if rank else error_of(comm.send, x, 1),
    ]  # fmt: skip
    if rank < 2:
        comm.recv(x, 0) if rank else comm.send(x, 1)
    if rank == 0:
        assert "cannot send to itself" in said[0]
        assert "a rank must be an integer from 0 to 2, not 3" in said[1]
        assert "not '1'" in said[2]
        assert said[3].endswith(
            "calls differ: rank 0 sends 4 x float32; rank 1 receives 3 x float32"
        )
        assert "refused its arguments: a torch tensor" in said[4]


def test_a_receiver_hears_that_the_sender_has_returned() -> None:
    """Whose process has ended by then."""

    def work(rank: int) -> None:
        if rank == 1:
            get_default().recv(np.ones(3), 0)

    with pytest.raises(CollectiveAborted, match="rank 0 has returned or was closed; rank 1 waits"):
        collectives.spawn(work, 2)


@on_ranks(2, timeout=200)
def test_a_receiver_hears_at_once_that_the_sender_has_left(rank: int) -> None:
    words = "rank 1 has returned or was closed; rank 0 waits for rank 1 to send"
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveAborted, match=words):
            get_default().recv(np.ones(3), 1)
        assert time.monotonic() - start < 100


@on_ranks(2)
def test_a_lane_number_is_checked(rank: int) -> None:
    lanes = get_default().lanes
    assert "integer from 1 to 64, not 0" in error_of(lanes, 0)
    assert "different numbers of lanes: [1, 2]" in error_of(lanes, 1 + rank)
    assert "not '2'" in error_of(lanes, "2")
