"""Tests and timings on one GPU: `python -m linkweave.bench.gpu_suite --budget 480`.

All ranks run on one GPU, so its memory stands for the links; "emulated links" limit the rate of a
send. Most rows launch all ranks of a plan at once; rows of threads and processes use `spawn`. The
most important rows come first. Results are checked, then timed, and written after every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from linkweave.bench.gpu_api import (
    Arrays,
    CupyArrays,
    Failed,
    TorchTensors,
    run_graph,
    run_killed,
    run_ranks,
    tiled,
    with_cuda,
)
from linkweave.bench.gpu_queue import GRAPH, dequeue
from linkweave.bench.gpu_sparse import GRADIENT, SparseRows, sparse_ranks
from linkweave.bench.timing import machine
from linkweave.collectives import CollectiveAborted, CollectiveError, plan_allreduce
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import candidates
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.gpu.executor import GpuRanks, virtual_ranks, width_of
from linkweave.collectives.runtime.reference import to_bfloat16
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.topology import load

MIB = 1 << 20
LINK = 25e9  # bytes/s: one NVLink of the DGX-1, for the rows with emulated links
Row = dict[str, Any]


class Suite:
    """The rows, on one device (`kernels.gpu.device.CudaDevice`)."""

    def __init__(
        self, device: Any, largest: int = 1024 * MIB, repeats: int = 20,
        libraries: Sequence[Arrays] = (CupyArrays(),),
    ) -> None:  # fmt: skip
        self.device, self.largest, self.repeats = device, largest, repeats
        self.libraries, self.gradient = libraries, min(GRADIENT, largest // 4)  # elements

    def rows(self) -> Iterator[tuple[str, Callable[[], Row]]]:
        """(name, what measures it), most important first."""
        yield "correct algorithms", self.algorithms
        yield "correct dtypes and ops", self.dtypes
        yield "abort", self.abort
        yield "latency 8 KiB", self.latency
        yield "latency of a hop", self.hop
        for arrays in self.libraries:
            yield (
                f"threads, {arrays.name}",
                lambda a=arrays: self.api(a, (2, 3, 8), (1, 2048, 250_000), True),
            )
        for arrays in self.libraries[-1:]:  # torch, where it is
            yield from SparseRows(self, arrays).rows()
        for arrays in self.libraries:
            for n in (2, 8):
                yield (
                    f"sparse_allreduce, {arrays.name}, {n} threads",
                    lambda a=arrays, n=n: sparse_ranks(n, a, True, self.gradient),
                )
        yield "dequeue of a gradient queue", lambda: dequeue(self)
        yield "device copy against 35 N, 8 ranks", self.bandwidth
        for size in (1, 16, 64, 256, 1024):
            if size * MIB <= self.largest:
                yield f"emulated links {size} MiB", lambda s=size: self.overlap(s * MIB, LINK)
        for size in (1, 16, 256):
            if size * MIB <= self.largest:
                yield f"uncapped {size} MiB", lambda s=size: self.overlap(s * MIB, None)
        for arrays in self.libraries:  # late: processes on one GPU take turns, slowly
            yield (
                f"IPC processes, {arrays.name}",
                lambda a=arrays: self.api(a, (2, 4, 8), (1, 2048, 30_000), False),
            )
        for arrays in self.libraries[:1]:
            yield (
                f"sparse_allreduce, {arrays.name}, 2 processes",
                lambda a=arrays: sparse_ranks(2, a, False, 0),
            )
            yield "IPC processes, killed rank", lambda a=arrays: {"seconds": run_killed(a)}
        if any(arrays.name == "torch" for arrays in self.libraries):
            yield "IPC processes, graph", lambda: {"checked": run_graph(2)}

    def api(
        self, arrays: Arrays, ranks: Sequence[int], sizes: tuple[int, ...], virtual: bool
    ) -> Row:
        """All collectives through `collectives.spawn`, on this one GPU."""
        row: Row = {"bytes": [4 * n for n in sizes]}
        for n in ranks:
            start = time.perf_counter()
            name = "dgx1-v100" if n == 8 else f"mesh-{n}"
            row[f"{n} ranks"] = {
                "checked": run_ranks(n, arrays, sizes, virtual, name),
                "seconds": time.perf_counter() - start,
            }
        return row

    def inputs(self, ranks: int, nbytes: int, dtype: str) -> list[np.ndarray]:
        rng = np.random.default_rng(nbytes)
        n, kind = nbytes // DTYPES[dtype].size, DTYPES[dtype].kind
        if kind != "float":
            below = 100 if kind == "int" else 2
            return [rng.integers(0, below, n).astype(dtype) for _ in range(ranks)]
        made = [rng.standard_normal(n, np.float32) for _ in range(ranks)]
        return [to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype) for x in made]

    @contextmanager
    def uploaded(self, arrays: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Addresses of the arrays on the GPU, freed at the end."""
        found = [self.device.upload(x) for x in arrays]
        try:
            yield found
        finally:
            for address in found:
                self.device.free(address)

    def check(
        self, ranks: GpuRanks, plan: Plan, nbytes: int, dtype: str, op: str, apart: bool = False,
        seen: bool = True,
    ) -> None:  # fmt: skip
        """Check one call against the reference, bit for bit.

        `apart`: results go to other buffers than the inputs. `seen`: ranks write results into each
        other's buffers, not through slots. Raises Failed.
        """
        prepared = ranks.prepare(plan, nbytes, dtype, op, seen=seen)
        given = self.inputs(plan.size, nbytes, dtype)
        others = [~x.view(np.uint8) for x in given] if apart else []
        with self.uploaded(given) as inputs, self.uploaded(others) as outputs:
            buffers = outputs or inputs
            ranks.run(prepared, buffers, inputs=inputs)
            ranks.check()
            wanted = reference.run(prepared.plan, given, op, bfloat16=dtype == "bfloat16")
            checks = [*zip(buffers, wanted, strict=True)]
            checks += zip(inputs, given, strict=True) if apart else ()  # which stay
            for rank, (address, want) in enumerate(checks):
                got = np.empty_like(want)
                self.device.download(address, got)
                if wrong := int((got.view(np.uint8) != want.view(np.uint8)).sum()):
                    what = f"{plan.algorithm} {nbytes} bytes {dtype} {op}"
                    raise Failed(f"{what}: {wrong} wrong bytes on rank {rank % plan.size}")

    def algorithms(self) -> Row:
        """Check every algorithm on 2 to 8 ranks at four sizes, in all ways of `check`."""
        done, skipped = 0, []
        for name in ("mesh-2", "mesh-3", "mesh-5", "mesh-8", "dgx1-v100", "dgx1-p100"):
            topology = load(name)
            with virtual_ranks(self.device, len(topology.gpus)) as ranks:
                for algorithm in candidates(topology):
                    ways = product((False, True), (True, False), (4, 4036, 8192, 1_000_036))
                    for apart, seen, nbytes in ways:
                        try:
                            plan = plan_allreduce(topology, nbytes, algorithm)
                            width_of(plan, ranks.occupancy("float32", "sum"))
                        except CollectiveError as error:  # not here, or too many blocks
                            skipped.append(f"{name} {algorithm}: {error}")
                            break
                        self.check(ranks, plan, nbytes, "float32", "sum", apart, seen)
                        done += 1
        return {"checked": done, "skipped": skipped}

    def dtypes(self) -> Row:
        """Check every dtype and op."""
        topology, done = load("mesh-3"), 0
        for dtype in DTYPES:
            for op in ops_of(dtype, gpu=True):
                with virtual_ranks(self.device, 3) as ranks:
                    for nbytes in (8 * 331, 8 * 50_021):
                        plan = plan_allreduce(topology, nbytes, "overlapped_tree")
                        self.check(ranks, plan, nbytes, dtype, op)
                        done += 1
        return {"checked": done}

    def seconds(self, enqueue: Callable[[], None], check: Callable[[], None]) -> float:
        """Median time of a call, from batches that are long enough for the host's clock."""
        enqueue()
        check()
        start = time.perf_counter()
        enqueue()
        check()
        batch = max(1, min(50, int(0.02 / max(1e-9, time.perf_counter() - start))))
        found = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            for _ in range(batch):
                enqueue()
            check()
            found.append((time.perf_counter() - start) / batch)
        return statistics.median(found)

    def timed(self, plan: Plan, nbytes: int, ps_per_byte: int = 0, seen: bool = True) -> float:
        with virtual_ranks(self.device, plan.size, timeout=60) as ranks:
            prepared = ranks.prepare(plan, nbytes, "float32", "max", seen=seen)
            with self.uploaded([tiled(r, nbytes) for r in range(plan.size)]) as buffers:
                ranks.run(prepared, buffers)
                ranks.check()
                want = tiled(plan.size - 1, nbytes)  # the largest, element by element
                got = np.empty_like(want)
                for rank in (0, plan.size - 1):
                    self.device.download(buffers[rank], got)
                    if not np.array_equal(got, want):
                        raise Failed(f"{plan.algorithm} {nbytes} bytes: rank {rank} is wrong")
                return self.seconds(
                    lambda: ranks.run(prepared, buffers, 0, ps_per_byte), ranks.check
                )

    def bandwidth(self) -> Row:
        """Memory traffic (35 N: 7 reduces of 3 N, 7 copies of 2 N) beside that of a plain copy."""
        nbytes = min(256 * MIB, self.largest)
        row: Row = {"bytes": nbytes, "copy_bytes_per_s": self.copy_rate(nbytes)}
        for algorithm, seen in product(("overlapped_double_tree", "tree"), (True, False)):
            plan = plan_allreduce(load("dgx1-v100"), nbytes, algorithm)
            seconds = self.timed(plan, nbytes, seen=seen)
            rate = 35 * nbytes / seconds
            row[algorithm + ("" if seen else ", slots")] = {
                "seconds": seconds, "bytes_per_s": rate, "share": rate / row["copy_bytes_per_s"],
            }  # fmt: skip
        return row

    def copy_rate(self, nbytes: int) -> float:
        """Bytes/s read and written by a plain copy."""
        with self.uploaded([np.zeros(nbytes, np.uint8)] * 2) as (one, other):
            finish = partial(self.device.synchronise, 0)
            return 2 * nbytes / self.seconds(lambda: self.device.copy(one, other, nbytes), finish)

    def overlap(self, nbytes: int, link: float | None) -> Row:
        """Overlapped against baseline double tree; `link` limits each send, in bytes/s."""
        topology, row = load("dgx1-v100"), {"bytes": nbytes, "link_bytes_per_s": link}
        for algorithm in ("double_tree", "overlapped_double_tree"):
            plan = plan_allreduce(topology, nbytes, algorithm)
            row[algorithm] = self.timed(plan, nbytes, round(1e12 / link) if link else 0)
        row["ratio"] = row["double_tree"] / row["overlapped_double_tree"]
        return row

    def latency(self) -> Row:
        """Latency of 8 KiB over 8 ranks."""
        plans = {name: plan_allreduce(load(name), 8192) for name in ("dgx1-v100", "mesh-8")}
        return {name: self.latency_of(plan) for name, plan in plans.items()}

    def hop(self) -> Row:
        """Latency of a hop: half of what one more rank adds to a chain, with 8 KiB."""
        plans = [plan_allreduce(load(f"mesh-{n}"), 8192, "chain", 1) for n in (2, 8)]
        short, long = (self.latency_of(plan)["replayed_us"] for plan in plans)
        return {"launch_and_two_hops_us": short, "hop_us": (long - short) / 12}

    def latency_of(self, plan: Plan) -> Row:
        """Latency of a launched call and of one in a replayed graph of many."""
        with virtual_ranks(self.device, plan.size) as ranks:
            prepared = ranks.prepare(plan, 8192, "float32", "sum")
            with self.uploaded([np.zeros(2048, np.float32)] * plan.size) as buffers:
                launched = self.seconds(lambda: ranks.run(prepared, buffers), ranks.check)

                def calls(stream: int) -> None:
                    for _ in range(GRAPH):
                        ranks.run(prepared, buffers, stream)

                replayed = self.seconds(self.device.capture(calls), ranks.check) / GRAPH
        return {"algorithm": plan.algorithm, "launched_us": launched * 1e6,
                "replayed_us": replayed * 1e6}  # fmt: skip

    def abort(self) -> Row:
        """Abort sends that would take minutes; then check new ranks."""
        plan = plan_allreduce(load("mesh-2"), 65536, "tree", 1)
        with virtual_ranks(self.device, 2, timeout=100) as ranks:
            prepared = ranks.prepare(plan, 65536, "float32", "sum")
            with self.uploaded(self.inputs(2, 65536, "float32")) as buffers:
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
        with virtual_ranks(self.device, 2) as ranks:
            self.check(ranks, plan, 65536, "float32", "sum")
        return {"seconds": taken}


def run(suite: Suite, budget: float, only: str, out: Path | None) -> list[Row]:
    """The rows whose names contain `only`, until the budget (s) is spent."""
    start, rows = time.monotonic(), []
    # asked before anything can break the GPU's context
    of = {"machine": machine(), "device": suite.device.describe()} if out else {}
    for name, measure in suite.rows():
        if only not in name:
            continue
        if time.monotonic() - start > budget:
            rows.append({"name": name, "state": "left out: the budget was spent"})
        else:
            try:
                rows.append({"name": name, "state": "ok", **measure()})
            except Exception as error:  # the other rows are wanted all the same
                rows.append({"name": name, "state": f"failed: {type(error).__name__}: {error}"})
        print(json.dumps(rows[-1]), flush=True)
        if out:
            out.write_text(json.dumps({**of, "rows": rows}, indent=1) + "\n")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m linkweave.bench.gpu_suite", description=__doc__
    )
    parser.add_argument("--budget", type=float, default=480, help="seconds (default 480)")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--out", type=Path, help="write JSON here, after every row")
    given = parser.parse_args(arguments)
    try:
        from linkweave.kernels.gpu.device import CudaDevice

        device = CudaDevice()
    except Exception as error:  # CuPy's own kinds, where it can be imported at all
        print(f"no GPU to run on: {error}", file=sys.stderr)
        return 2
    libraries: list[Arrays] = [CupyArrays()]
    if with_cuda():
        libraries.append(TorchTensors())
    else:
        print("torch is not here, or has no CUDA: its rows are left out", file=sys.stderr)
    rows = run(Suite(device, libraries=libraries), given.budget, given.only, given.out)
    return int(any(row["state"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
