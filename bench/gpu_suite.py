"""What one GPU can show: checks and timings, each in a process of its own.

`python -m linkweave.bench.gpu_suite core --out core.json`, and `ipc` for ranks in processes. A
command ends within its budget, whatever its rows do; the most important rows come first.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from linkweave.bench.gpu import plans, systems
from linkweave.bench.gpu.api import (
    Arrays,
    CupyArrays,
    TorchTensors,
    run_graph,
    run_killed,
    run_ranks,
)
from linkweave.bench.gpu.calls import beside_matmul, beside_nccl, dequeue, enqueue, new_sizes
from linkweave.bench.gpu.meter import MIB, Meter
from linkweave.bench.gpu.runner import ENVIRONMENT, Result, Row, in_process, run, summary, write
from linkweave.bench.gpu.sparse import GRADIENT, SparseRows, sparse_ranks
from linkweave.bench.gpu.train import POLICIES, train
from linkweave.bench.gpu.triton import TritonRows
from linkweave.bench.timing import machine
from linkweave.collectives.runtime.gpu.driver import CudaDriver

BUDGET_S = 540.0
PROBE_S = 60.0
EMULATED = ((64, 4), (256, 5), (16, 4), (1024, 9), (1, 3))  # (MiB, expected seconds)
UNCAPPED = ((256, 5), (16, 4), (1, 3))


def rows(meter: Meter, libraries: Sequence[Arrays], gpus: int) -> Iterator[Row]:
    """All rows, the most important ones of each part first. The last library is torch, if it is
    installed."""
    yield from _core(meter, libraries)
    yield from _ipc(meter, libraries, gpus)


def _row(part: str, name: str, seconds: float, measure: Callable[..., Result], *args: Any) -> Row:
    return Row(name, part, seconds, partial(measure, *args))


def _core(meter: Meter, libraries: Sequence[Arrays]) -> Iterator[Row]:
    row, cupy, last = partial(_row, "core"), libraries[0], libraries[-1]
    yield row("compile all kernels", plans.COMPILE_S, plans.compiled, meter)
    yield row("correct algorithms", 25, plans.algorithms, meter)
    yield row("correct dtypes and ops", 5, plans.dtypes, meter)
    yield row("abort", 5, plans.abort, meter)
    yield row("device copy against 35 N, 8 ranks", 10, plans.bandwidth, meter, 256 * MIB)
    yield row("latency 8 KiB", 3, plans.latency, meter)
    yield row("latency of a hop", 3, plans.hop, meter)
    for n, seconds in EMULATED:
        yield row(f"emulated links {n} MiB", seconds, plans.overlap, meter, n * MIB, plans.LINK)
    if last.name == "torch":
        yield row("all-reduces beside matrix products", 12, beside_matmul, meter, 64 * MIB,
                  plans.LINK)  # fmt: skip
    yield from SparseRows(meter, last).rows()
    yield from TritonRows(meter).rows()
    yield row(f"enqueue, {cupy.name} threads", 8, enqueue, cupy, (1, 2, 8), True)
    yield row(f"new sizes, {cupy.name} threads", 8, new_sizes, cupy, 2, True)
    for arrays in libraries:
        for n, seconds in ((2, 12), (3, 6), (8, 11)):
            yield row(f"threads, {arrays.name}, {n} ranks", seconds,
                      run_ranks, arrays, n, (1, 2048, 250_000), True)  # fmt: skip
    yield row("dequeue of a gradient queue", 4, dequeue, meter, 16 * MIB)
    for arrays in libraries:
        for n in (2, 8):
            yield row(f"sparse_allreduce, {arrays.name}, {n} threads", 10, sparse_ranks, meter,
                      arrays, n, True, GRADIENT)  # fmt: skip
    for n, seconds in UNCAPPED:
        yield row(f"uncapped {n} MiB", seconds, plans.overlap, meter, n * MIB, None)


def _ipc(meter: Meter, libraries: Sequence[Arrays], gpus: int) -> Iterator[Row]:
    row, cupy, last = partial(_row, "ipc"), libraries[0], libraries[-1]
    for arrays in libraries:
        for n, seconds in ((2, 10), (4, 20), (8, 46)):
            yield row(f"processes, {arrays.name}, {n} ranks", seconds,
                      run_ranks, arrays, n, (1, 2048, 30_000), False)  # fmt: skip
        if arrays is cupy:
            yield row("a rank is killed", 10, run_killed, cupy)
            yield row("sparse_allreduce, 2 processes", 10, sparse_ranks, meter, cupy, 2, False, 0)
            yield row(f"enqueue, {cupy.name} processes", 10, enqueue, cupy, (2,), False)
            yield row(f"new sizes, {cupy.name} processes", 8, new_sizes, cupy, 2, False)
    if last.name == "torch":
        yield row("a graph of torch, 2 processes", 8, run_graph, last)
        for policy in POLICIES:
            yield row(f"train by {policy}, 2 processes", 20, train, last, 2, policy)
        for mode in ("gtopk", "topk"):
            yield row(f"{mode} as on the CPU, 4 processes", 42, systems.gtopk, last, 4, mode,
                      11_000_000)  # fmt: skip
        for kind in ("SGD", "SparseAdam"):
            yield row(f"an embedding by {kind} as on the CPU, 4 processes", 40, systems.embedding,
                      last, 4, kind)  # fmt: skip
        yield row("gTop-k beside dense, 4 processes", 40, systems.converge, last, 4)
        yield row("allreduce beside NCCL", 40 if gpus > 1 else 1, beside_nccl, last, gpus)


def described(meter: Meter) -> Result:
    return {**meter.device.describe(), "gpus": CudaDriver().count()}


def outline(found: Result) -> Result:
    """A result without its lists, settings and long texts."""
    return {
        key: outline(value) if isinstance(value, dict) else value
        for key, value in found.items()
        if key not in ("settings", "stderr") and not isinstance(value, list)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m linkweave.bench.gpu_suite", description=__doc__
    )
    parser.add_argument("part", nargs="?", choices=("core", "ipc"), default="core")
    parser.add_argument("--budget", type=float, default=BUDGET_S,
                        help="seconds in which the command ends (default %(default)g)")  # fmt: skip
    parser.add_argument("--only", action="append", default=[],
                        help="rows whose names contain this, or another --only")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write JSON here, after every row")
    given = parser.parse_args(arguments)
    meter = Meter()
    probe = in_process(Row("device", "core", PROBE_S, partial(described, meter)), PROBE_S)
    if probe["state"] != "ok":
        print(f"no GPU to run on: {probe['state'].removeprefix('failed: ')}", file=sys.stderr)
        return 2
    libraries: list[Arrays] = [CupyArrays()]
    if find_spec("torch"):
        libraries.append(TorchTensors())
    only = given.only or [""]
    chosen = [row for row in rows(meter, libraries, probe["gpus"])
              if row.part == given.part and any(word in row.name for word in only)]  # fmt: skip
    if not chosen:
        parser.error(f"no row of {given.part} has {' or '.join(map(repr, only))} in its name")
    about = {"machine": machine(), "device": probe, "part": given.part, "environment": ENVIRONMENT}
    found: list[Result] = []
    for row in run(chosen, start + given.budget):
        found.append(row)
        print(json.dumps(outline(row)), flush=True)
        if given.out:
            write(given.out, {**about, "rows": found})
        elif row["state"].startswith("failed"):
            print(row.get("stderr", ""), file=sys.stderr)
    print(summary(found))
    return int(any(row["state"].startswith("failed") for row in found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the row's processes are killed
    sys.exit(main())
