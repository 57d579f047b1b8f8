"""The runtime of virtual ranks on a device of threads: production tables, kernel and errors."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from host_gpu import HostDevice, needs_compiler

from linkweave.collectives import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import plan_allreduce
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.gpu import executor
from linkweave.collectives.runtime.gpu.memory import LocalMemory
from linkweave.topology import load

pytestmark = needs_compiler


def inputs(plan: Plan, n: int, salt: int = 0) -> list[np.ndarray]:
    return [
        np.random.default_rng([r, n, salt]).standard_normal(n).astype(np.float32)
        for r in range(plan.size)
    ]


@pytest.mark.parametrize("algorithm", ["overlapped_double_tree", "ccube_dgx1", "packed_trees"])
def test_sizes_of_both_protocols_one_after_another(algorithm: str) -> None:
    device = HostDevice()
    topology = load("dgx1-v100")
    with executor.virtual_ranks(device, 8) as ranks:
        for again in range(2):
            for n in (0, 1, 1009, 300_007, 1009):
                plan = plan_allreduce(topology, 4 * n, algorithm)
                prepared = ranks.prepare(plan, 4 * n, "float32", "sum")
                assert prepared.config.low_latency == (prepared.plan.chunk_bytes(4 * n) <= 16384)
                given = inputs(plan, n, again)
                buffers = [x.copy() for x in given]
                ranks.run(prepared, [int(b.ctypes.data) for b in buffers])
                ranks.check()
                for got, want in zip(buffers, reference.run(prepared.plan, given), strict=True):
                    assert got.tobytes() == want.tobytes()
    assert not device.memory


def test_one_plan_serves_many_sizes_with_one_piece_of_memory() -> None:
    device = HostDevice()
    with executor.virtual_ranks(device, 4) as ranks:
        plan = plan_allreduce(load("mesh-4"), 1 << 20, "tree")
        ranks.prepare(plan, 1 << 20, "float32", "sum")
        held = sum(map(len, device.memory.values()))
        ranks.prepare(plan, 1 << 21, "float32", "sum")
        assert sum(map(len, device.memory.values())) - held < 10_000  # tables alone


def test_blocks_beyond_the_device_are_refused_and_a_cap_is_kept() -> None:
    plan = plan_allreduce(load("dgx1-v100"), 1 << 20, "overlapped_double_tree")
    small, large = HostDevice(10), HostDevice()
    holds = [device.resident("float32", "sum") for device in (small, large)]
    with (
        pytest.raises(
            CollectiveError,
            match=rf"needs 30 thread blocks for 8 ranks at once; the GPU holds {holds[0]}$",
        ),
        executor.virtual_ranks(small, 8) as ranks,
    ):
        ranks.prepare(plan, 1 << 20, "float32", "sum")
    with (
        executor.virtual_ranks(large, 8, max_blocks=20) as ranks,
        pytest.raises(CollectiveError, match=rf"GPU holds {holds[1]}, max_blocks is 20"),
    ):
        ranks.prepare(plan, 1 << 20, "float32", "sum")
    with executor.virtual_ranks(HostDevice(), 8, max_blocks=70) as ranks:
        assert ranks.prepare(plan, 1 << 20, "float32", "sum").config.width == 2


@pytest.mark.parametrize(("machine", "tracks"), [("dgx1-v100", 34), ("dgx-h100", 15)])
def test_launches_leave_room_by_default(machine: str, tracks: int) -> None:
    """A rank's launch has at most 80 blocks, or a fifth of what its GPU holds; only a plan of more
    tracks has more."""
    plan = plan_allreduce(load(machine), 1 << 26)
    assert max(sum(t.rank == rank for t in plan.tracks) for rank in range(8)) == tracks
    alone = [((rank,), 444) for rank in range(8)]
    assert executor.width_of(plan, alone) == 80 // tracks
    assert executor.width_of(plan, alone, 264) == 264 // tracks
    v100 = [((rank,), 237) for rank in range(8)]
    assert executor.width_of(plan, v100) == 47 // tracks
    together = [((*range(8),), 2640)]
    assert executor.width_of(plan, together) == 8 * 80 // len(plan.tracks)
    short = [((rank,), tracks) for rank in range(8)]
    assert executor.width_of(plan, short) == 1
    with patch.object(executor, "MOST_BLOCKS", tracks - 1):
        assert executor.width_of(plan, alone) == 1


def test_a_wrong_number_of_buffers_is_refused() -> None:
    with executor.virtual_ranks(HostDevice(), 2) as ranks:
        prepared = ranks.prepare(plan_allreduce(load("mesh-2"), 8), 8, "float32", "sum")
        with pytest.raises(CollectiveError, match=r"3 buffers for 2 ranks"):
            ranks.run(prepared, [0, 0, 0])


@pytest.mark.parametrize("nbytes", [400, 400_000], ids=["lines", "slots"])
def test_the_error_says_who_waits_for_whom(nbytes: int) -> None:
    """Rank 2's blocks are never launched."""
    plan = plan_allreduce(load("mesh-3"), nbytes, "chain", 1)
    with executor.virtual_ranks(HostDevice(), 3, timeout=0.3) as ranks:
        prepared = ranks.prepare(plan, nbytes, "float32", "sum")
        (part,) = prepared.parts
        present = tuple((rank, p) for rank, p in part.programs if rank != 2)
        assert present == part.programs[: len(present)]  # rank 2's are the last
        without = replace(prepared, parts=(replace(part, programs=present),))
        buffers = inputs(plan, nbytes // 4)
        ranks.run(without, [int(b.ctypes.data) for b in buffers])
        with pytest.raises(CollectiveTimeout) as caught:
            ranks.check()
    assert re.match(
        r"rank 1 waits for (the data|a free slot) of chunk 0 on channel \d \(step \d+\) from "
        r"rank 2 for 0.3 s", str(caught.value)
    ), str(caught.value)  # fmt: skip
    assert (caught.value.rank, caught.value.peer, caught.value.chunk) == (1, 2, 0)
    assert "; rank 0 waits for the data of chunk 0" in str(caught.value)


def test_a_timeout_on_one_gpu_stops_the_others() -> None:
    """A launch that starts later would push into tensors that are in use again."""
    devices = [HostDevice(33, index=i) for i in range(2)]
    with executor.GpuRanks(dict(enumerate(devices)), LocalMemory(devices)) as ranks:
        ranks._abort[0] = 1  # as by a block of GPU 0
        with pytest.raises(CollectiveAborted):
            ranks.check()
        words = [ctypes.c_uint32.from_address(ranks._stops[i]).value for i in range(2)]
    assert words == [1, 1]


def test_abort_frees_all_and_new_ranks_can_be_made() -> None:
    device = HostDevice()
    plan = plan_allreduce(load("mesh-2"), 1 << 14, "tree", 1)
    buffers = inputs(plan, 1 << 12)
    given = [x.copy() for x in buffers]
    with executor.virtual_ranks(device, 2, timeout=1000) as ranks:
        prepared = ranks.prepare(plan, 1 << 14, "float32", "sum")
        threading.Timer(0.2, ranks.abort).start()
        start = time.monotonic()
        addresses = [int(b.ctypes.data) for b in buffers]
        ranks.run(prepared, addresses, ps_per_byte=4 * 10**9)  # 66 seconds for each hop
        with pytest.raises(CollectiveAborted, match=r"the launch was aborted; rank \d"):
            ranks.check()
        assert time.monotonic() - start < 60
    with executor.virtual_ranks(device, 2) as ranks:
        prepared = ranks.prepare(plan, 1 << 14, "float32", "sum")
        buffers = [x.copy() for x in given]
        ranks.run(prepared, [int(b.ctypes.data) for b in buffers])
        ranks.check()
        assert buffers[0].tobytes() == reference.run(prepared.plan, given)[0].tobytes()
