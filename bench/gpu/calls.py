"""Rows of `bench.gpu_suite` that time calls: on the host, beside NCCL, and beside a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from linkweave.bench.collectives import Settings, run
from linkweave.bench.gpu.api import Arrays, on_ranks
from linkweave.bench.gpu.meter import Meter, noise, settings_of
from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.collectives import get_default, plan_allreduce
from linkweave.collectives.runtime.gpu.executor import width_of
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
    row: Result = {}
    for n in ranks:
        seconds = on_ranks(time_enqueue, n, arrays, rounds, virtual=virtual)
        row[f"{n} ranks"] = {"enqueue_us": 1e6 * max(seconds)}
    return row


def time_new_sizes(rank: int, arrays: Arrays, sizes: int) -> float:
    """Median seconds of the host for the first all-reduce of a size."""
    comm, found = get_default(), []
    x = arrays.put(noise(rank, NBYTES))
    for n in range(NBYTES // 4 - sizes, NBYTES // 4):
        start = time.perf_counter()
        comm.allreduce(x[:n], "max")
        found.append(time.perf_counter() - start)
    comm.synchronize()
    return statistics.median(found)


def new_sizes(arrays: Arrays, ranks: int, virtual: bool, sizes: int = 50) -> Result:
    seconds = on_ranks(time_new_sizes, ranks, arrays, sizes, virtual=virtual)
    return {"ranks": ranks, "first_call_us": 1e6 * max(seconds)}


def beside_nccl(
    arrays: Arrays, gpus: int, sizes: Sequence[int] = NCCL_BYTES, rounds: int = 5
) -> Result:
    """Time `allreduce` beside NCCL, a process a GPU; the slowest rank's times."""
    if gpus < 2:
        raise LeftOut(f"NCCL needs a GPU for each rank, and this machine has {gpus}")
    arrays.load()
    rows = [*run(Settings(gpus, tuple(sizes), "auto", rounds, device="cuda"))]
    if wrong := [f"{row.library}, {row.size} bytes" for row in rows if row.wrong]:
        raise Failed(f"wrong results: {'; '.join(wrong)}")
    times = {(row.library, row.size): row.time_us / 1e6 for row in rows}
    found: Result = {"gpus": gpus}
    for size in sizes:
        ours, theirs = times["linkweave", size], times["nccl", size]
        nccl = {"seconds": theirs, "times_ours": theirs / ours}
        found[f"{size} bytes"] = {"seconds": ours, "nccl": nccl}
    return found


MATRIX = 8192
WIDTHS = (16, 8, 4, 2, 1)  # thread blocks of each track


def beside_matmul(
    meter: Meter, nbytes: int, link: float, matrix: int = MATRIX, where: str = "cuda"
) -> Result:
    """All-reduces over links of `link` bytes/s beside products of matrices, by thread blocks.

    Alone, each takes about as long. `hidden` is the share of that time which running them together
    saves: 1 if neither slows the other.
    """
    import torch

    device, plan = meter.device, plan_allreduce(load("mesh-4"), nbytes, "overlapped_double_tree")
    a, b = (torch.randn(matrix, matrix, device=where).bfloat16() for _ in range(2))
    out, model, side, rows = torch.empty_like(a), device.make_stream(), device.make_stream(), []
    on = partial(torch.cuda.ExternalStream, model) if where == "cuda" else lambda: None

    def multiply(times: int) -> None:
        with torch.cuda.stream(on()):
            for _ in range(times):
                torch.mm(a, b, out=out)

    def wait() -> None:
        for stream in (model, side):
            device.synchronise(stream)

    product = meter.seconds(partial(multiply, 1), wait, 5)
    with meter.ranks(plan.size) as ranks, meter.filled(plan.size, nbytes) as memory:
        most = width_of(plan, ranks.occupancy("float32", "max"))
        for width in (each for each in WIDTHS if each <= most):
            prepared = ranks.prepare(plan, nbytes, "float32", "max", width)
            reduce = partial(ranks.run, prepared, memory.buffers, side, round(1e12 / link),
                             inputs=memory.inputs)  # fmt: skip
            alone = meter.seconds(reduce, wait, 5)
            calls = max(1, round(8 * product / alone))
            products = max(1, round(calls * alone / product))

            def both(calls: int = calls, products: int = products, reduce: Any = reduce) -> None:
                for _ in range(calls):
                    reduce()
                multiply(products)

            apart = calls * alone, products * product
            saved = sum(apart) - meter.seconds(both, wait, 5)
            for rank, address in enumerate(memory.buffers):
                what = f"an all-reduce beside products, rank {rank}"
                meter.expect(address, memory.largest, what, nbytes)
            blocks = settings_of(ranks, prepared, nbytes)["blocks"]
            rows.append({"blocks": blocks, "allreduce_s": alone, "hidden": saved / min(apart)})
            print(rows[-1])  # kept if a later one fails
            ranks.check()
    for stream in (model, side):
        device.free_stream(stream)
    return {"bytes": nbytes, "link_bytes_per_s": link, "product_s": product, "rows": rows}


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
