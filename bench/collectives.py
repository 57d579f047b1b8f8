"""`linkweave bench collectives`, and its case `allreduce`: linkweave beside gloo and MPI, on GPUs
beside NCCL, in one run, checked, then timed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.command.options import missing
from linkweave.bench.peers import (
    IN_PLACE,
    Gloo,
    Mpi,
    busbw,
    by_torch,
    collective,
    given,
    mpi_launcher,
    room,
    splits,
    timed,
    wanted,
)
from linkweave.bench.timing import machine, schedule
from linkweave.collectives.calls.default import get_default
from linkweave.collectives.planning.planner import choose, predict
from linkweave.collectives.runtime.cpu.cores import NEAR_NS, round_trip_ns
from linkweave.topology import Topology

BUDGET_BYTES = 1 << 28  # that are moved in one round, in 2 to 20 iterations


@dataclass(frozen=True, slots=True)
class Row:
    """One library at one size, in nccl-tests' units: us, GB/s (decimal)."""

    collective: str
    size: int
    count: int
    type: str
    redop: str
    library: str
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    model_us: float | None
    state: str
    best_us: float
    worst_us: float
    ratio: float | None
    """The time of the faster gloo, or of NCCL, over this one's in the same round; median over the
    rounds."""


@dataclass(frozen=True, slots=True)
class Settings:
    ranks: int
    sizes: tuple[int, ...]
    topology: Topology | str
    rounds: int = 5
    batch: bool = True
    peers: bool = True
    gloo: bool = True
    collectives: tuple[str, ...] = ("allreduce",)
    device: str = "cpu"

    @property
    def machine(self) -> str:
        """The topology's name."""
        return self.topology if isinstance(self.topology, str) else self.topology.name


def sizes(begin: int, end: int, factor: int, item: int = 4) -> tuple[int, ...]:
    """Sizes begin, begin * factor, ... up to end in bytes, rounded down to whole items."""
    found = []
    size = max(begin, item)
    while size <= end:
        found.append(size // item * item)
        size *= factor
    return tuple(found)


def run(settings: Settings, progress: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Measure every collective and size; all libraries take turns within each round.

    Calls `progress` with the rows of each. gloo and MPI are left out if they are not
    installed. Raises CollectiveError.
    """
    if settings.device == "cuda":
        return _on_gpus(settings, progress)
    without = missing("torch", "mpi4py") if settings.peers else []
    settings = replace(settings, gloo=settings.peers and "torch" not in without)
    launcher = mpi_launcher() if settings.peers else None
    mpi = Mpi(launcher, settings.ranks) if launcher else None
    rows: list[Row] = []
    before = os.sched_getscheduler(0)
    try:
        schedule(settings.batch)
        with tempfile.TemporaryDirectory() as folder:
            for i, (kind, size) in enumerate(product(settings.collectives, settings.sizes)):
                store = str(Path(folder) / f"store{i}")
                found = collectives.spawn(
                    _rank, settings.ranks, settings.topology, (kind, size, settings, store, mpi),
                    timeout=120.0,
                )  # fmt: skip
                rows += found[0]
                progress(found[0])
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
        if mpi:
            mpi.close()
    return rows


def ours(comm: Any, kind: str, x: Any, out: Any, count: int, op: str = "sum") -> Callable[[], Any]:
    """A call of linkweave from `x`, in place or into `out`, of a message of `count` elements; the
    root is rank 0."""
    root = comm.rank == 0
    gathered, mine = (splits(rank, comm.size, count) for rank in (0, comm.rank))
    return {
        "allreduce": lambda: comm.allreduce(x, op), "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x, op), "allgather": lambda: comm.allgather(x, out=out),
        "reduce_scatter": lambda: comm.reduce_scatter(x, op, out=out),
        "alltoall": lambda: comm.alltoall(x, out),
        "allgatherv": lambda: comm.allgather(x, counts=gathered, out=out),
        "alltoallv": lambda: comm.alltoall(x, out, mine, mine),
        "gather": lambda: comm.gather(x, out=out if root else None),
        "scatter": lambda: comm.scatter(x if root else None, out=out),
    }[kind]  # fmt: skip


def _rank(
    rank: int, kind: str, size: int, settings: Settings, store: str, mpi: Mpi | None
) -> list[Row]:
    comm = get_default()
    schedule(settings.batch)
    compared = settings.gloo and kind != "allgatherv"
    gloo = Gloo(rank, comm.size, store, settings.batch) if compared else None
    mine, want = (of(kind, rank, comm.size, size // 4) for of in (given, wanted))
    shape = room(kind, comm.size, size // 4)
    private = mine.copy(), np.empty(shape, np.float32)
    shared = comm.empty(mine.shape), comm.empty(shape)
    iterations = max(2, min(20, BUDGET_BYTES // max(size * 8, 1)))

    def libraries() -> Iterator[tuple[str, Any, Callable[[], Any], bool]]:
        """(name, (input, output), call, whether under SCHED_BATCH)"""
        yield "linkweave", private, ours(comm, kind, *private, size // 4), settings.batch
        yield "linkweave empty", shared, ours(comm, kind, *shared, size // 4), settings.batch
        if gloo is not None:
            call = by_torch(kind, *private, size // 4, gloo.batch)
            yield "gloo", private, call, settings.batch
        if gloo is not None and settings.batch:
            call = by_torch(kind, *private, size // 4, gloo.default)
            yield "gloo default", private, call, False

    found: dict[str, list[list[float]]] = {}
    wrong: dict[str, int] = {}
    states = [_state(comm)]
    for number in range(settings.rounds + 1):  # round 0 checks the results and is not timed
        for name, (x, out), call, batch in libraries():
            schedule(batch)

            def prepare(x: Any = x) -> None:
                x[...] = mine

            out[...] = -1

            times = np.array(timed(call, prepare, comm.barrier, iterations if number else 1))
            schedule(settings.batch)
            result = x if kind in IN_PLACE else out
            wrong[name] = wrong.get(name, 0) + _wrong(comm, result, want)
            comm.allreduce(times, "max")
            if number:
                found.setdefault(name, []).append(times.tolist())
        if mpi is not None:
            if rank == 0:
                slowest, bad_mpi = mpi.time(kind, size, iterations if number else 1)
                wrong[mpi.name] = wrong.get(mpi.name, 0) + bad_mpi
                if number:
                    found.setdefault(mpi.name, []).append(slowest)
            comm.barrier()
        states.append(_state(comm))
    if gloo is not None:
        gloo.close()
    told = [ns for ns in states if ns is not None]
    return _rows(kind, size, settings, found, wrong, told) if rank == 0 else []


def _state(comm: Any) -> float | None:
    """A flag's round trip between the first two cores in ns, on rank 0; None if it cannot be
    measured."""
    first, second = ([*sorted(os.sched_getaffinity(0))] * 2)[:2]
    ns = round_trip_ns(first, second) if comm.rank == 0 else None
    comm.barrier()
    return ns


def _wrong(comm: Any, result: Any, want: Any) -> int:
    """How many elements of all ranks' results are not what each wants."""
    bad = np.array([0 if want is None else int((result != want).sum())], np.int64)
    comm.allreduce(bad)
    return int(bad[0])


def _on_gpus(settings: Settings, progress: Callable[[list[Row]], None]) -> list[Row]:
    """`run` with torch tensors of CUDA, a process a GPU."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (kind, size) in enumerate(product(settings.collectives, settings.sizes)):
            found = collectives.spawn(
                torch_rank, settings.ranks, settings.topology,
                (kind, size, settings, f"{folder}/store{i}"), timeout=120.0, device="cuda",
            )  # fmt: skip
            rows += found[0]
            progress(found[0])
    return rows


def torch_rank(
    rank: int, kind: str, size: int, settings: Settings, store: str, device: str = "cuda",
    backend: str = "nccl",
) -> list[Row]:  # fmt: skip
    """One rank of `_on_gpus`. A call's time ends when the GPU has done it."""
    import torch
    import torch.distributed as dist

    comm = get_default()
    files = dist.FileStore(store, comm.size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=comm.size)
    mine, want = (of(kind, rank, comm.size, size // 4) for of in (given, wanted))
    x = torch.from_numpy(mine).to(device, copy=True)
    out = torch.empty(room(kind, comm.size, size // 4), device=device)
    calls = {"linkweave": ours(comm, kind, x, out, size // 4),
             backend: by_torch(kind, x, out, size // 4)}  # fmt: skip
    done = torch.cuda.synchronize if device == "cuda" else int
    iterations = max(2, min(20, BUDGET_BYTES // max(size * 8, 1)))
    found: dict[str, list[list[float]]] = {}
    wrong: dict[str, int] = {}

    def prepare() -> None:
        x.copy_(torch.from_numpy(mine))
        done()

    for number in range(settings.rounds + 1):  # round 0 checks the results and is not timed
        for name, call in calls.items():
            out.fill_(-1)
            times = np.array(timed(lambda call=call: (call(), done()), prepare, comm.barrier,
                                   iterations if number else 1))  # fmt: skip
            result = (x if kind in IN_PLACE else out).cpu().numpy()
            wrong[name] = wrong.get(name, 0) + _wrong(comm, result, want)
            comm.allreduce(times, "max")
            if number:
                found.setdefault(name, []).append(times.tolist())
    dist.destroy_process_group()
    return _rows(kind, size, settings, found, wrong, [], backend) if rank == 0 else []


def _rows(
    kind: str, size: int, settings: Settings, found: dict[str, list[list[float]]],
    wrong: dict[str, int], states: list[float], peer: str = "gloo",
) -> list[Row]:  # fmt: skip
    near = sum(ns < NEAR_NS for ns in states)
    state = f"near {near}/{len(states)}, {np.median(states):.0f} ns" if states else ""
    # the model of a GPU machine says nothing about CPU ranks
    model = None
    if isinstance(settings.topology, Topology) and settings.topology.on_memory:
        plain = collective(kind).name
        name = choose(settings.topology, size, plain)
        model = predict(settings.topology, size, name, plain)[0] * 1e6
    groups = [found[one] for one in (peer, f"{peer} default") if one in found]
    theirs = [min(float(np.median(t)) for t in turn) for turn in zip(*groups, strict=True)]
    rows = []
    for name, rounds in found.items():
        medians = [float(np.median(t)) for t in rounds]
        seconds = float(np.median(medians))
        algbw = size / seconds / 1e9
        n = settings.ranks
        ratio = (
            float(np.median([t / m for t, m in zip(theirs, medians, strict=True)]))
            if theirs
            else None
        )
        rows.append(
            Row(
                kind, size, size // 4, "float", "sum" if collective(kind).combines else "none",
                name, seconds * 1e6, algbw, algbw * busbw(kind, n), wrong[name],
                model if name.startswith("linkweave") else None, state,
                min(medians) * 1e6, max(medians) * 1e6, ratio,
            )
        )  # fmt: skip
    return rows


def as_json_text(settings: Settings, rows: list[Row]) -> str:
    """JSON of the figures and of what they depend on."""
    gpu = ""
    if settings.device == "cuda":
        from linkweave.collectives.distributed.engine import model

        gpu = model()
    report = {
        "benchmark": "collectives",
        "ranks": settings.ranks,
        "topology": settings.machine,
        "device": settings.device,
        "gpu": gpu,
        "rounds": settings.rounds,
        "sched_batch": settings.batch,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(report, indent=1)


_COLUMNS = (
    f"{'collective':14}{'bytes':>11}  {'library':16}{'us':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    f"{{:>8}}{'model us':>10}{'error':>7}  state"
)


def header(settings: Settings) -> str:
    """What was run, on what, and the columns with their units."""
    info = machine()
    versions = ", ".join(f"{k} {v}" for k, v in info["versions"].items())
    batch = "SCHED_BATCH" if settings.batch else "default scheduling"
    if settings.device == "cuda":
        return "\n".join([
            f"# {', '.join(settings.collectives)}: {settings.ranks} GPUs on {settings.machine}, "
            f"{settings.rounds} rounds, float32, sum; {versions}",
            "# us: median over rounds of each round's median of the slowest rank, until the GPU",
            "# has done it; x nccl: median of the rounds' ratios to NCCL",
            _COLUMNS.format("x nccl"),
        ])  # fmt: skip
    return "\n".join([
        f"# {', '.join(settings.collectives)}: {settings.ranks} CPU ranks on "
        f"{settings.machine}, {batch}, {settings.rounds} rounds, float32, sum",
        f"# {info['cores']} cores, {info['cpu']}, Linux {info['kernel']}",
        f"# {versions}",
        "# us: median over rounds of each round's median of the slowest rank; x gloo: median of",
        "# the rounds' ratios to gloo, under SCHED_BATCH or the default policy, whichever was",
        "# faster; model: predicted, with its error",
        "# near 4/7: in 4 of 7 checks the first two cores shared a close cache (a flag went there",
        f"# and back in less than {NEAR_NS} ns)",
        _COLUMNS.format("x gloo"),
    ])  # fmt: skip


def line(row: Row) -> str:
    """One library at one size; GB/s are decimal."""
    ratio = f"{row.ratio:8.2f}" if row.ratio is not None else f"{'-':>8}"
    model = f"{'-':>10}{'-':>7}"
    if row.model_us is not None:
        error = (row.model_us - row.time_us) / row.time_us
        model = f"{row.model_us:10.1f}{error:7.0%}"
    return (
        f"{row.collective:14}{row.size:11}  {row.library[:16]:16}{row.time_us:10.1f}"
        f"{row.algbw:8.2f}{row.busbw:8.2f}{row.wrong:8}{ratio}{model}  {row.state.split(',')[0]}"
    )
