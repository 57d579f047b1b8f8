"""Lanes, splits and channels: calls under way at once, in memory that all of them see."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linkweave import collectives
from linkweave.collectives import CollectiveAborted, CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu.mapping import SEGMENT
from tests.cpu.helpers import error_of


def shared_with_parts(rank: int) -> list[Any]:
    comm: Any = get_default()
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
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_tensors_of_the_whole_are_not_staged_on_parts(size: int) -> None:
    total = float(sum(range(size)))
    assert collectives.spawn(shared_with_parts, size) == [[(total, True), total] * 3] * size


def short_beside_long(rank: int) -> int:
    """How often 64 bytes are through on one lane while 64 MiB are on the other."""
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
    return ahead


def test_a_short_call_does_not_wait_for_a_long_one_on_another_lane() -> None:
    """In one of many tries, as the machine may be busy: behind it, it would be in none."""
    assert all(collectives.spawn(short_beside_long, 2))


def in_other_order(rank: int) -> list[str]:
    comm = get_default()
    first, second = comm.lanes(2)
    x = np.ones(4, np.float32)
    works = [lane.allreduce(x, async_op=True) for lane in ((first, second), (second, first))[rank]]
    said = [error_of(work.wait) for work in works]
    comm.barrier()
    return said


def test_lanes_compare_the_order_of_all_their_calls() -> None:
    for said in collectives.spawn(in_other_order, 2):
        assert all(re.search("as call [12] on lanes; ranks .* as call [12] on", s) for s in said)


def many_parts(rank: int) -> list[int]:
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
    return [before, most, held()]


def test_closed_parts_give_their_segments_back() -> None:
    assert collectives.spawn(many_parts, 3) == [[1, 1 + 6 + 2 * 3, 1]] * 3


def use_memory(rank: int) -> list[int]:
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
    return [a - found[0] for a in found]


def pages() -> int:
    """MiB of the ranks' shared file that are memory."""
    every = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    files = [fd for fd in every if "memfd:linkweave" in os.path.realpath(fd)]
    return max(os.stat(fd).st_blocks for fd in files) * 512 >> 20


def test_memory_comes_back_at_once() -> None:
    for _, tensors, none, plan, closed in collectives.spawn(use_memory, 2):
        assert 60 <= tensors <= 70 and none <= 4
        assert closed <= plan + 1 <= 8


def no_segment_left(rank: int) -> str:
    comm: Any = get_default()
    taken = comm._arena.mapping.take(4000 * SEGMENT) if rank == 0 else None
    said = error_of(comm.lanes, 64) + error_of(comm.lanes, 64 + 1)
    comm.barrier()
    if taken:
        comm._arena.mapping.give(*taken)
    comm.barrier()
    with comm.lanes(1)[0] as lane:
        lane.barrier()
    return said


def test_too_many_parts_are_refused_on_every_rank() -> None:
    for said in collectives.spawn(no_segment_left, 2):
        assert "close those that are not needed" not in said or "segments" in said
        assert "integer from 1 to 64, not 65" in said


def pairs(rank: int) -> list[Any]:
    comm = get_default()
    size = comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    found = []
    for n in (0, 1, 7, 100_003):
        sent, got = np.full(n, rank, np.int32), np.zeros(n, np.int32)
        work = comm.send(sent, after, async_op=True)
        comm.recv(got, before)
        assert work is not None
        work.wait()
        found.append(bool((got == before).all()))
    if rank == 0:
        for i in range(3):
            collectives.send(torch.full((2,), float(i)), size - 1)
    if rank == size - 1:
        x = torch.zeros(2)
        for i in range(3):
            collectives.recv(x, 0)
            found.append(x.tolist() == [float(i)] * 2)
    comm.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_send_to_each_other(size: int) -> None:
    assert all(all(found) for found in collectives.spawn(pairs, size, f"mesh-{size}"))


def wrong_messages(rank: int) -> list[str]:
    comm = get_default()
    x = np.ones(4, np.float32)
    said = [
        error_of(comm.send, x, rank), error_of(comm.recv, x, 3), error_of(comm.send, x, "1"),
        error_of(comm.recv, x[:3], 0) if rank else error_of(comm.send, x, 1),
        error_of(comm.recv, [1], 0) if rank else error_of(comm.send, x, 1),
    ]  # fmt: skip
    if rank < 2:
        comm.recv(x, 0) if rank else comm.send(x, 1)
    return said


def test_messages_that_do_not_fit() -> None:
    found = collectives.spawn(wrong_messages, 3)
    assert "cannot send to itself" in found[0][0]
    assert "a rank must be an integer from 0 to 2, not 3" in found[0][1]
    assert "not '1'" in found[0][2]
    said = "differs: rank 0 sends 4 x float32; rank 1 receives 3 x float32"
    assert found[0][3].endswith(said)
    assert "refused its arguments: a torch tensor" in found[0][4]


def never_sent(rank: int, path: str) -> None:
    comm = get_default()
    if rank == 0:
        start = time.monotonic()
        try:
            comm.recv(np.ones(3), 1)
        except CollectiveAborted as error:
            Path(path).write_text(f"{time.monotonic() - start}|{error}")


def test_a_receiver_hears_at_once_that_the_sender_has_left(tmp_path: Path) -> None:
    collectives.spawn(never_sent, 2, args=(str(tmp_path / "said"),), timeout=200)
    took, text = (tmp_path / "said").read_text().split("|")
    assert (
        float(took) < 100
        and "rank 1 has returned or was closed; rank 0 waits for rank 1 to send" in text
    )


def test_a_lane_number_is_checked() -> None:
    def work(rank: int) -> list[str]:
        comm = get_default()
        return [error_of(comm.lanes, 0), error_of(comm.lanes, 1 + rank), error_of(comm.lanes, "2")]

    for said in collectives.spawn(work, 2):
        assert "integer from 1 to 64, not 0" in said[0]
        assert "different numbers of lanes: [1, 2]" in said[1]
        assert "not '2'" in said[2]
    assert isinstance(CollectiveError(), Exception)
