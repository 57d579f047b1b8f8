"""Rows of `bench.gpu_suite` that time public calls: on the host, and beside NCCL."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from linkweave import collectives
from linkweave.bench.gpu_api import Arrays, on_ranks
from linkweave.bench.gpu_meter import noise
from linkweave.bench.gpu_runner import Failed, LeftOut, Result
from linkweave.bench.sparse import medians
from linkweave.collectives import get_default

CALLS = 50  # enqueued without a wait; the GPU's queue holds more
NBYTES = 8192
NCCL_BYTES = (8 << 10, 1 << 20, 64 << 20, 1 << 30)


def time_enqueue(rank: int, arrays: Arrays, rounds: int) -> float:
    """Median seconds of the host for an all-reduce that has been made before."""
    comm, found = get_default(), []
    x = arrays.put(noise(rank, NBYTES))
    for _ in range(rounds + 1):
        comm.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            comm.allreduce(x, "max")
        found.append((time.perf_counter() - start) / CALLS)
    comm.synchronize()
    return statistics.median(found[1:])


def enqueue(arrays: Arrays, ranks: Sequence[int], virtual: bool, rounds: int = 20) -> Result:
    """The host's time for a call, on the slowest rank; a rank alone launches nothing."""
    row: Result = {}
    for n in ranks:
        seconds = on_ranks(time_enqueue, n, arrays, rounds, virtual=virtual)
        row[f"{n} ranks"] = {"enqueue_us": 1e6 * max(seconds)}
    return row


def time_beside_nccl(
    rank: int, store: str, sizes: Sequence[int], rounds: int
) -> list[dict[str, float]]:
    """Median seconds of all-reduces of torch tensors, of ours and of NCCL, by size."""
    import torch
    import torch.distributed as dist

    comm = get_default()
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, comm.size), rank=rank, world_size=comm.size
    )
    found = []
    for nbytes in sizes:
        ours = torch.from_numpy(noise(rank, nbytes)).cuda()
        theirs = ours.clone()

        def one(x: torch.Tensor = ours) -> None:
            comm.allreduce(x, "max")
            comm.synchronize()

        def other(x: torch.Tensor = theirs) -> None:
            dist.all_reduce(x, dist.ReduceOp.MAX)
            torch.cuda.synchronize()

        calls: dict[str, Callable[[], object]] = {"linkweave": one, "nccl": other}
        found.append(medians(calls, rounds, comm.barrier))
        if not torch.equal(ours, theirs):
            raise Failed(f"an all-reduce of {nbytes} bytes is not what NCCL finds")
    dist.destroy_process_group()
    return found


def beside_nccl(
    arrays: Arrays, gpus: int, sizes: Sequence[int] = NCCL_BYTES, rounds: int = 20
) -> Result:
    """Time `allreduce` beside NCCL, a process a GPU; the slowest rank's times."""
    if gpus < 2:
        raise LeftOut(f"NCCL needs a GPU for each rank, and this machine has {gpus}")
    arrays.load()
    with tempfile.TemporaryDirectory() as folder:
        times = collectives.spawn(
            time_beside_nccl, gpus, args=(f"{folder}/store", sizes, rounds), device="cuda",
            timeout=60,
        )  # fmt: skip
    row: Result = {"gpus": gpus}
    for i, nbytes in enumerate(sizes):
        ours, theirs = (max(t[i][name] for t in times) for name in ("linkweave", "nccl"))
        nccl = {"seconds": theirs, "times_ours": theirs / ours}
        row[f"{nbytes} bytes"] = {"seconds": ours, "nccl": nccl}
    return row
