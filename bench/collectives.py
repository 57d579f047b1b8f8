"""`linkweave bench collectives`, and its case `allreduce`: linkweave beside gloo and MPI, on GPUs
beside NCCL, in one run, checked, then timed."""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
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
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import choose, plan_allreduce, predict
from linkweave.collectives.runtime.cpu.cores import past_caches
from linkweave.topology import Topology

Library = tuple[str, tuple[Any, Any], Callable[[], Any], bool]
"""Name, (input, output), call, and whether under SCHED_BATCH."""
LEGEND = ""
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
    algorithm: str = ""
    """Of an all-reduce of linkweave, by which `--measured` knows it."""
    num_chunks: int = 0

    def __str__(self) -> str:
        ratio = f"{self.ratio:8.2f}" if self.ratio is not None else f"{'-':>8}"
        model = f"{'-':>10}{'-':>7}"
        if self.model_us is not None:
            error = (self.model_us - self.time_us) / self.time_us
            model = f"{self.model_us:10.1f}{error:7.0%}"
        return (
            f"{self.collective:14}{self.size:11}  {self.library[:16]:16}{self.time_us:10.1f}"
            f"{self.algbw:8.2f}{self.busbw:8.2f}{self.wrong:8}{ratio}{model}  "
            f"{self.state}"
        )


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
        return self.topology if isinstance(self.topology, str) else self.topology.name


def sizes(begin: int, end: int, factor: int, item: int = 4) -> tuple[int, ...]:
    """Sizes begin, begin * factor, ... up to end in bytes, rounded down to whole items."""
    found = []
    size = max(begin, item)
    while size <= end:
        found.append(size // item * item)
        size *= factor
    return tuple(found)


def run(settings: Settings) -> Iterator[Row]:
    """Measure every collective and size; all libraries take turns within each round.

    gloo and MPI are left out if they are not installed. Raises CollectiveError.
    """
    peers = settings.peers and settings.device == "cpu"
    without = missing("torch", "mpi4py") if peers else []
    settings = replace(settings, gloo=peers and "torch" not in without)
    launcher = mpi_launcher() if peers else None
    mpi = Mpi(launcher, settings.ranks) if launcher else None
    before = os.sched_getscheduler(0)
    try:
        if settings.device == "cpu":
            schedule(settings.batch)
        with tempfile.TemporaryDirectory() as folder:
            for i, (kind, size) in enumerate(product(settings.collectives, settings.sizes)):
                fn, last = (_rank, mpi) if settings.device == "cpu" else (torch_rank, "cuda")
                yield from collectives.spawn(
                    fn, settings.ranks, settings.topology,
                    (kind, size, settings, f"{folder}/store{i}", last), timeout=120.0,
                    device=settings.device,
                )[0]  # fmt: skip
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
        if mpi:
            mpi.close()


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
    comm, count = get_default(), size // 4
    schedule(settings.batch)
    compared = settings.gloo and kind != "allgatherv"
    gloo = Gloo(rank, comm.size, store, settings.batch) if compared else None
    mine, shape = given(kind, rank, comm.size, count), room(kind, comm.size, count)
    private = mine.copy(), np.empty(shape, np.float32)
    shared = comm.empty(mine.shape), comm.empty(shape)
    libraries = [
        ("linkweave", private, ours(comm, kind, *private, count), settings.batch),
        ("linkweave empty", shared, ours(comm, kind, *shared, count), settings.batch),
    ]
    if gloo is not None:
        call = by_torch(kind, *private, count, gloo.batch)
        libraries.append(("gloo", private, call, settings.batch))
        if settings.batch:
            call = by_torch(kind, *private, count, gloo.default)
            libraries.append(("gloo default", private, call, False))
    rows = _measured(comm, kind, size, settings, libraries, lambda x: np.copyto(x, mine), mpi)
    if gloo is not None:
        gloo.close()
    return rows


def _measured(
    comm: Any, kind: str, size: int, settings: Settings, libraries: Sequence[Library],
    fill: Callable[[Any], Any], mpi: Mpi | None = None, peer: str = "gloo",
) -> list[Row]:  # fmt: skip
    """The rows on rank 0 of all libraries, which take turns; `fill` prepares an input."""
    want = wanted(kind, comm.rank, comm.size, size // 4)
    iterations = max(2, min(20, BUDGET_BYTES // max(size * 8, 1)))
    found: dict[str, list[list[float]]] = defaultdict(list)
    wrong: Counter[str] = Counter()
    on_cpu = settings.device == "cpu"
    states = [_state(comm)] if on_cpu else []
    for number in range(settings.rounds + 1):  # round 0 checks the results and is not timed
        calls = iterations if number else 1
        for name, (x, out), call, batch in libraries:
            out[...] = -1
            if on_cpu:
                schedule(batch)
            times = np.array(timed(call, partial(fill, x), comm.barrier, calls))
            if on_cpu:
                schedule(settings.batch)
            wrong[name] += _wrong(comm, x if kind in IN_PLACE else out, want)
            comm.allreduce(times, "max")
            found[name].append(times.tolist())
        if mpi is not None:
            if comm.rank == 0:
                slowest, bad = mpi.time(kind, size, calls)
                wrong[mpi.name] += bad
                found[mpi.name].append(slowest)
            comm.barrier()
        states += [_state(comm)] if on_cpu else []
    timed_only = {name: rounds[1:] for name, rounds in found.items()}
    told = [past for past in states if past is not None]
    if comm.rank:
        return []
    plan = None
    if kind == "allreduce":
        plan = plan_allreduce(comm.topology_for(libraries[0][1][0]), size)
    return _rows(kind, size, settings, timed_only, wrong, told, peer, plan)


def _state(comm: Any) -> bool | None:
    """Whether blocks pass between cores sooner past the caches, on rank 0; None if that cannot be
    measured."""
    past = past_caches(os.getpid(), os.getpid()) if comm.rank == 0 else None
    comm.barrier()
    return past


def _wrong(comm: Any, result: Any, want: Any) -> int:
    got = result.cpu().numpy() if hasattr(result, "cpu") else result
    bad = np.array([0 if want is None else int((got != want).sum())], np.int64)
    comm.allreduce(bad)
    return int(bad[0])


def torch_rank(
    rank: int, kind: str, size: int, settings: Settings, store: str, device: str = "cuda",
    backend: str = "nccl",
) -> list[Row]:  # fmt: skip
    """A rank with torch tensors, beside NCCL. A call's time ends when the GPU has done it."""
    import torch
    import torch.distributed as dist

    comm, count = get_default(), size // 4
    files = dist.FileStore(store, comm.size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=comm.size)
    mine = torch.from_numpy(given(kind, rank, comm.size, count))
    x, out = mine.to(device, copy=True), torch.empty(room(kind, comm.size, count), device=device)
    done = torch.cuda.synchronize if device == "cuda" else int
    calls = {"linkweave": ours(comm, kind, x, out, count), backend: by_torch(kind, x, out, count)}
    libraries = [
        (name, (x, out), lambda call=call: (call(), done()), False) for name, call in calls.items()
    ]
    rows = _measured(
        comm, kind, size, settings, libraries, lambda x: (x.copy_(mine), done()), peer=backend
    )
    dist.destroy_process_group()
    return rows


def _rows(
    kind: str, size: int, settings: Settings, found: dict[str, list[list[float]]],
    wrong: dict[str, int], states: list[bool], peer: str = "gloo", plan: Plan | None = None,
) -> list[Row]:  # fmt: skip
    state = f"past {sum(states)}/{len(states)}" if states else ""
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
                *([plan.algorithm, plan.num_chunks] if plan and name == "linkweave" else []),
            )
        )  # fmt: skip
    return rows


def about(settings: Settings) -> dict[str, Any]:
    """What the figures depend on."""
    gpu = ""
    if settings.device == "cuda":
        from linkweave.collectives.distributed.engine import model

        gpu = model()
    return {
        "benchmark": "collectives", "ranks": settings.ranks, "topology": settings.machine,
        "device": settings.device, "gpu": gpu, "rounds": settings.rounds,
        "sched_batch": settings.batch,
    }  # fmt: skip


_COLUMNS = (
    f"{'collective':14}{'bytes':>11}  {'library':16}{'us':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    f"{{:>8}}{'model us':>10}{'error':>7}  state"
)


def header(settings: Settings) -> str:
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
        "# faster; model: predicted, with its error; linkweave empty: tensors of comm.empty, in",
        "# memory that all ranks share",
        "# past 4/7: in 4 of 7 checks 512 KiB passed between cores sooner past the caches",
        _COLUMNS.format("x gloo"),
    ])  # fmt: skip
