"""Rows of `bench.gpu_suite` that launch plans: all ranks of a plan on one GPU, by one launch.

The GPU's memory stands for the links; "emulated links" limit the rate of a send.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import product

import numpy as np

from linkweave.bench.gpu.meter import GRAPH, Filled, Meter, noise, settings_of
from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.collectives import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    plan_allreduce,
)
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import candidates
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Prepared, width_of
from linkweave.collectives.runtime.gpu.memory import Bases, LocalMemory
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.kernels.gpu.compile import cubin
from linkweave.kernels.gpu.source import options, source
from linkweave.topology import load

LINK = 25e9  # bytes/s: one NVLink of the DGX-1, for the rows with emulated links
MACHINES = ("mesh-2", "mesh-3", "mesh-5", "mesh-8", "dgx1-v100", "dgx1-p100")
SIZES = (4, 4036, 8192, 1_000_036)  # bytes
CORES, MOST_WORKERS = len(os.sched_getaffinity(0)), 16
COMPILE_S = 7 + 92 / CORES  # 52 kernels of 1.7 to 1.8 s on a core


def compiled(meter: Meter) -> Result:
    """Compile the plan interpreter for every dtype and op, on all cores; later rows find the code
    in the cache. Returns registers per thread and resident thread blocks."""
    jobs = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
    words = sorted({options(*job) for job in jobs})
    workers = min(CORES, MOST_WORKERS)  # each loads CuPy; a container's quota is not among CORES
    # forked before this process uses CUDA
    with multiprocessing.get_context("fork").Pool(workers, import_module, ("cupy",)) as pool:
        architecture = int(import_module("cupy").cuda.Device(meter.gpu).compute_capability)
        text = source("plan/plan.cu")
        start = time.perf_counter()
        pool.starmap(cubin, [(text, w, architecture) for w in words])
    found = time.perf_counter() - start
    device = meter.device
    kernels = [
        {"dtype": dtype, "op": op, "registers": device.registers(dtype, op),
         "resident": device.resident(dtype, op)}
        for dtype, op in jobs
    ]  # fmt: skip
    return {"architecture": architecture, "compiled": len(words), "compile_s": found,
            "kernels": kernels}  # fmt: skip


# ---- correctness ------------------------------------------------------------------------------
def inputs(ranks: int, nbytes: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(nbytes)
    n, kind = nbytes // DTYPES[dtype].size, DTYPES[dtype].kind
    if kind != "float":
        below = 100 if kind == "int" else 2
        return [rng.integers(0, below, n).astype(dtype) for _ in range(ranks)]
    made = [rng.standard_normal(n, np.float32) for _ in range(ranks)]
    return [
        reference.rounded(x, dtype) if DTYPES[dtype].stored != dtype else x.astype(dtype)
        for x in made
    ]


def check(
    meter: Meter, ranks: GpuRanks, plan: Plan, nbytes: int, dtype: str, op: str,
    apart: bool = False, seen: bool = True,
) -> None:  # fmt: skip
    """Check one call against the reference, bit for bit.

    `apart`: results go to other buffers than the inputs. `seen`: ranks write results into each
    other's buffers, not through slots. Raises Failed.
    """
    prepared = ranks.prepare(plan, nbytes, dtype, op, seen=seen)
    given = inputs(plan.size, nbytes, dtype)
    others = [~x.view(np.uint8) for x in given] if apart else []
    with meter.uploaded(given) as values, meter.uploaded(others) as outputs:
        ranks.run(prepared, outputs or values, inputs=values)
        ranks.check()
        wanted = reference.run(prepared.plan, given, op, dtype=dtype)
        what = f"{plan.algorithm} {nbytes} bytes {dtype} {op}"
        for rank, (address, want) in enumerate(zip(outputs or values, wanted, strict=True)):
            meter.expect(address, want, f"{what}, rank {rank}")
        for rank, (address, want) in enumerate(zip(values, given, strict=True) if apart else ()):
            meter.expect(address, want, f"{what}, the input of rank {rank}")


def algorithms(
    meter: Meter, machines: Sequence[str] = MACHINES, sizes: Sequence[int] = SIZES
) -> Result:
    done, skipped = 0, []
    for name in machines:
        topology = load(name)
        with meter.ranks(len(topology.gpus)) as ranks:
            for algorithm in candidates(topology):
                for apart, seen, nbytes in product((False, True), (True, False), sizes):
                    plan = plan_allreduce(topology, nbytes, algorithm)
                    try:
                        width_of(plan, ranks.occupancy("float32", "sum"))
                    except CollectiveError as error:  # all ranks of a machine on one GPU
                        skipped.append(f"{algorithm} on {name}: {error}")
                        break
                    check(meter, ranks, plan, nbytes, "float32", "sum", apart, seen)
                    done += 1
    return {"checked": done, "skipped": skipped}


def dtypes(meter: Meter) -> Result:
    topology, done = load("mesh-3"), 0
    for dtype in DTYPES:
        for op in ops_of(dtype):
            with meter.ranks(3) as ranks:
                for nbytes in (8 * 331, 8 * 50_021):
                    plan = plan_allreduce(topology, nbytes, "overlapped_tree")
                    check(meter, ranks, plan, nbytes, dtype, op)
                    done += 1
    return {"checked": done}


def abort(meter: Meter) -> Result:
    plan = plan_allreduce(load("mesh-2"), 65536, "tree", 1)
    with meter.ranks(2, timeout=100) as ranks:
        prepared = ranks.prepare(plan, 65536, "float32", "sum")
        with meter.uploaded(inputs(2, 65536, "float32")) as buffers:
            ranks.run(prepared, buffers, 0, 4 * 10**9)
            time.sleep(0.2)  # until the kernel runs
            start = time.perf_counter()
            ranks.abort()
            try:
                ranks.check()
            except CollectiveAborted:
                taken = time.perf_counter() - start
            else:
                raise Failed("an abort was not noticed")
    if taken > 5:
        raise Failed(f"an abort took {taken:.3g} s")
    with meter.ranks(2) as ranks:
        check(meter, ranks, plan, 65536, "float32", "sum")
    return {"abort_s": taken}


class OneMemory(LocalMemory):
    """Memory that the launches of several ranks share: each asks for it, the first allocates."""

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> Bases:
        if not self._made:
            self._shared = super().bases(nbytes, pairs)
        return self._shared


def side_by_side(meter: Meter, timeout: float = 10.0) -> Result:
    """Two ranks of one plan, each by a launch of its own, which waits for the other one: as the
    launches of lanes and splits of ranks on several GPUs may."""
    nbytes, device = 65536, meter.device
    plan, memory = plan_allreduce(load("mesh-2"), nbytes, "tree"), OneMemory([device, device])
    streams = [device.make_stream() for _ in range(2)]
    with ExitStack() as last:
        ranks = [last.enter_context(GpuRanks({r: device}, memory, timeout)) for r in range(2)]
        holds = [found for each in ranks for found in each.occupancy("float32", "sum")]
        how = (plan, nbytes, "float32", "sum", width_of(plan, holds))
        prepared = [each.prepare(*how, seen=False) for each in ranks]
        given = inputs(2, nbytes, "float32")
        for order in ((0, 1), (1, 0)):
            with meter.uploaded(given) as buffers:
                for r in order:
                    ranks[r].run(prepared[r], [buffers[r]], streams[r])
                try:
                    for each, stream in zip(ranks, streams, strict=True):
                        each.check(stream)
                except CollectiveTimeout as error:  # CUDA does not promise it
                    raise LeftOut(
                        "this GPU carries out one launch after the other, so calls of lanes and "
                        f"splits on it take turns: {error}"
                    ) from None
                wanted = reference.run(prepared[0].plan, given, "sum")
                for r, (address, want) in enumerate(zip(buffers, wanted, strict=True)):
                    meter.expect(address, want, f"two launches, rank {r}")
    for stream in streams:
        device.free_stream(stream)
    return {"checked": 4}


# ---- latency ----------------------------------------------------------------------------------
def latency(meter: Meter) -> Result:
    plans = {name: plan_allreduce(load(name), 8192) for name in ("dgx1-v100", "mesh-8")}
    return {name: latency_of(meter, plan) for name, plan in plans.items()}


def hop(meter: Meter) -> Result:
    """Latency of a hop: half of what one more rank adds to a chain, with 8 KiB."""
    plans = [plan_allreduce(load(f"mesh-{n}"), 8192, "chain", 1) for n in (2, 8)]
    short, long = (latency_of(meter, plan) for plan in plans)
    return {"launch_and_two_hops_us": short["replayed_us"],
            "hop_us": (long["replayed_us"] - short["replayed_us"]) / 12,
            "settings": long["settings"]}  # fmt: skip


def latency_of(meter: Meter, plan: Plan) -> Result:
    """Latency of a launched call and of one in a replayed graph of many; the host's time of a
    launch."""
    with meter.ranks(plan.size) as ranks:
        prepared = ranks.prepare(plan, 8192, "float32", "max")
        with meter.uploaded([noise(rank, 8192) for rank in range(plan.size)]) as buffers:
            run = partial(ranks.run, prepared, buffers)
            launched = meter.seconds(run, ranks.check)
            replayed = meter.replayed(run, ranks.check)
            start = time.perf_counter()
            for _ in range(GRAPH):
                run()
            enqueued = (time.perf_counter() - start) / GRAPH
            ranks.check()
        return {"launched_us": launched * 1e6, "replayed_us": replayed * 1e6,
                "enqueue_us": enqueued * 1e6,
                "settings": settings_of(ranks, prepared, 8192)}  # fmt: skip


# ---- bandwidth --------------------------------------------------------------------------------
def timed(meter: Meter, plan: Plan, nbytes: int, ps_per_byte: int = 0, seen: bool = True) -> Result:
    with meter.ranks(plan.size) as ranks, meter.filled(plan.size, nbytes) as memory:
        prepared = ranks.prepare(plan, nbytes, "float32", "max", seen=seen)
        seconds = checked_seconds(meter, ranks, prepared, memory, ps_per_byte)
        return {"seconds": seconds, "settings": settings_of(ranks, prepared, nbytes)}


def checked_seconds(
    meter: Meter, ranks: GpuRanks, prepared: Prepared, memory: Filled, ps_per_byte: int = 0,
    repeats: int | None = None,
) -> float:  # fmt: skip
    """Seconds of a call in place, after a call with checked results."""
    buffers, size = memory.buffers, prepared.plan.size
    for address in buffers:
        meter.device.zero(address, memory.nbytes, 0)
    ranks.run(prepared, buffers, 0, ps_per_byte, inputs=memory.inputs)
    ranks.check()
    for rank in (0, size - 1):
        what = f"{prepared.plan.algorithm} {memory.nbytes} bytes, rank {rank}"
        meter.expect(buffers[rank], memory.largest, what, memory.nbytes)
    run = partial(ranks.run, prepared, buffers, 0, ps_per_byte)
    return meter.seconds(run, ranks.check, repeats)


def bandwidth(meter: Meter, nbytes: int) -> Result:
    """Bytes/s, counted as 35 N (7 reduces of 3 N, 7 copies of 2 N), beside those of a copy."""
    row: Result = {"bytes": nbytes, "copy_bytes_per_s": meter.copy_rate(nbytes)}
    for algorithm, seen in product(("overlapped_double_tree", "tree"), (True, False)):
        plan = plan_allreduce(load("dgx1-v100"), nbytes, algorithm)
        found = timed(meter, plan, nbytes, seen=seen)
        rate = 35 * nbytes / found["seconds"]
        share = rate / row["copy_bytes_per_s"]
        row[algorithm + ("" if seen else ", slots")] = found | {"bytes_per_s": rate, "share": share}
    return row


def overlap(meter: Meter, nbytes: int, link: float | None) -> Result:
    """Overlapped against baseline double tree; `link` limits each send, in bytes/s."""
    topology, row = load("dgx1-v100"), {"bytes": nbytes, "link_bytes_per_s": link}
    for algorithm in ("double_tree", "overlapped_double_tree"):
        plan = plan_allreduce(topology, nbytes, algorithm)
        row[algorithm] = timed(meter, plan, nbytes, round(1e12 / link) if link else 0)
    row["ratio"] = row["double_tree"]["seconds"] / row["overlapped_double_tree"]["seconds"]
    return row
