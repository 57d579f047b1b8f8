"""Rows of `bench.gpu_suite` that time public calls: on the host, and beside NCCL."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

from linkweave.bench.collectives import Settings, run
from linkweave.bench.gpu.api import Arrays, on_ranks
from linkweave.bench.gpu.meter import Meter, noise, settings_of
from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.collectives import get_default, plan_allreduce
from linkweave.topology import load

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


def beside_nccl(
    arrays: Arrays, gpus: int, sizes: Sequence[int] = NCCL_BYTES, rounds: int = 5
) -> Result:
    """Time `allreduce` beside NCCL, a process a GPU; the slowest rank's times."""
    if gpus < 2:
        raise LeftOut(f"NCCL needs a GPU for each rank, and this machine has {gpus}")
    arrays.load()
    rows = run(Settings(gpus, tuple(sizes), "auto", rounds, device="cuda"))
    if wrong := [f"{row.library}, {row.size} bytes" for row in rows if row.wrong]:
        raise Failed(f"wrong results: {'; '.join(wrong)}")
    times = {(row.library, row.size): row.time_us / 1e6 for row in rows}
    found: Result = {"gpus": gpus}
    for size in sizes:
        ours, theirs = times["linkweave", size], times["nccl", size]
        nccl = {"seconds": theirs, "times_ours": theirs / ours}
        found[f"{size} bytes"] = {"seconds": ours, "nccl": nccl}
    return found


LAYERS = 16


def dequeue(meter: Meter, nbytes: int) -> Result:
    """Check an early dequeue; time dequeues of a finished layer in a graph of many."""
    device = meter.device
    plan = plan_allreduce(load("dgx1-v100"), nbytes, "overlapped_double_tree")
    with meter.ranks(plan.size) as ranks, meter.filled(plan.size, nbytes) as memory:
        buffers, layer = memory.buffers, nbytes // LAYERS
        prepared = ranks.prepare(plan, nbytes, "float32", "max", layers=[layer] * LAYERS)
        begun = {rank: device.make_event() for rank in range(plan.size)}
        end, copy = device.make_event(), device.allocate(layer)
        main, other = device.make_stream(), device.make_stream()
        first = memory.largest[: layer // 4]

        def early(ps_per_byte: int) -> bool:
            """Whether the first layer can be copied before the call has ended."""
            for address in (*buffers, copy):
                device.zero(address, layer, main)
            counted = ranks.run(prepared, buffers, main, ps_per_byte, begun, inputs=memory.inputs)
            device.record(end, main)
            device.wait(begun[0], other)
            ranks.dequeue(prepared, counted, 0, 0, other)
            device.copy(copy, buffers[0], layer, other)
            device.synchronise(other)
            found = not device.ready(end)
            ranks.check(main)
            meter.expect(copy, first, "the first layer when it is dequeued")
            return found

        early(0)  # whatever is loaded at its first use may wait for the GPU
        if not early(round(1e12 / nbytes)):  # a link takes a second or more for all
            raise Failed("a dequeue waited for the whole all-reduce")
        counted = ranks.run(prepared, buffers, main, 0, begun)
        ranks.check(main)
        last = partial(ranks.dequeue, prepared, counted, 0, LAYERS - 1)
        replayed = meter.replayed(last, ranks.check)
        settings = settings_of(ranks, prepared, nbytes)
        device.free(copy)
        for event in (*begun.values(), end):
            device.free_event(event)
        for stream in (main, other):
            device.free_stream(stream)
    return {"bytes": nbytes, "dequeue_us": replayed * 1e6, "settings": settings}
