"""`linkweave bench allreduce`: linkweave beside gloo and MPI in one run, checked, then timed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.options import missing
from linkweave.bench.peers import Gloo, Mpi, mpi_launcher, timed
from linkweave.bench.timing import NEAR_NS, machine, round_trip_ns, schedule
from linkweave.collectives.launch.default import get_default
from linkweave.collectives.planning.planner import choose, predict
from linkweave.topology import Topology

BUDGET_BYTES = 1 << 28  # that are moved in one round, in 2 to 20 iterations


@dataclass(frozen=True, slots=True)
class Row:
    """One library at one size, in nccl-tests' units: us, GB/s (decimal)."""

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
    """Gloo's time (SCHED_BATCH) over this one's in the same round; median over the rounds."""


@dataclass(frozen=True, slots=True)
class Settings:
    ranks: int
    sizes: tuple[int, ...]
    topology: Topology
    rounds: int = 5
    batch: bool = True
    peers: bool = True
    gloo: bool = True


def sizes(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """Sizes begin, begin * factor, ... up to end in bytes, rounded down to whole float32."""
    found = []
    size = max(begin, 4)
    while size <= end:
        found.append(size // 4 * 4)
        size *= factor
    return tuple(found)


def run(settings: Settings, progress: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Measure every size; all libraries take turns within each round.

    Calls `progress` with the rows of each size. gloo and MPI are left out if they are not
    installed. Raises CollectiveError.
    """
    without = missing("torch", "mpi4py") if settings.peers else []
    settings = replace(settings, gloo=settings.peers and "torch" not in without)
    launcher = mpi_launcher() if settings.peers else None
    mpi = Mpi(launcher, settings.ranks) if launcher else None
    rows: list[Row] = []
    before = os.sched_getscheduler(0)
    try:
        schedule(settings.batch)
        with tempfile.TemporaryDirectory() as folder:
            for i, size in enumerate(settings.sizes):
                store = str(Path(folder) / f"store{i}")
                found = collectives.spawn(
                    _rank, settings.ranks, settings.topology, (size, settings, store, mpi),
                    timeout=120.0,
                )  # fmt: skip
                rows += found[0]
                progress(found[0])
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
        if mpi:
            mpi.close()
    return rows


def _rank(rank: int, size: int, settings: Settings, store: str, mpi: Mpi | None) -> list[Row]:
    comm = get_default()
    schedule(settings.batch)
    gloo = Gloo(rank, comm.size, store, settings.batch) if settings.gloo else None
    count = size // 4
    pattern = (np.arange(count) % 251).astype(np.float32)
    mine = pattern + np.float32(rank)
    want = pattern * comm.size + np.float32(comm.size * (comm.size - 1) // 2)
    private, shared = np.empty(count, np.float32), comm.empty(count)
    iterations = max(2, min(20, BUDGET_BYTES // max(size * 8, 1)))

    def libraries() -> Iterator[tuple[str, Any, Callable[[], Any], bool]]:
        """(name, buffer, call, whether under SCHED_BATCH)"""
        yield "linkweave", private, partial(comm.allreduce, private), settings.batch
        yield "linkweave empty", shared, partial(comm.allreduce, shared), settings.batch
        if gloo is not None:
            yield "gloo", private, partial(gloo.allreduce, private, gloo.batch), settings.batch
        if gloo is not None and settings.batch:
            yield "gloo default", private, partial(gloo.allreduce, private, gloo.default), False

    found: dict[str, list[list[float]]] = {}
    wrong: dict[str, int] = {}
    states = [round_trip_ns(comm)]
    for number in range(settings.rounds + 1):  # round 0 checks the results and is not timed
        for name, buffer, call, batch in libraries():
            schedule(batch)

            def prepare(buffer: Any = buffer) -> None:
                buffer[:] = mine

            times = np.array(timed(call, prepare, comm.barrier, iterations if number else 1))
            schedule(settings.batch)
            bad = np.array([int((buffer != want).sum())], np.int64)
            comm.allreduce(bad)
            wrong[name] = wrong.get(name, 0) + int(bad[0])
            comm.allreduce(times, "max")
            if number:
                found.setdefault(name, []).append(times.tolist())
        if mpi is not None:
            if rank == 0:
                slowest, bad_mpi = mpi.time(size, iterations if number else 1)
                wrong[mpi.name] = wrong.get(mpi.name, 0) + bad_mpi
                if number:
                    found.setdefault(mpi.name, []).append(slowest)
            comm.barrier()
        states.append(round_trip_ns(comm))
    if gloo is not None:
        gloo.close()
    return _rows(size, settings, found, wrong, states) if rank == 0 else []


def _rows(
    size: int, settings: Settings, found: dict[str, list[list[float]]], wrong: dict[str, int],
    states: list[float],
) -> list[Row]:  # fmt: skip
    near = sum(ns < NEAR_NS for ns in states)
    state = f"near {near}/{len(states)}, {np.median(states):.0f} ns"
    # the model of a GPU machine says nothing about CPU ranks
    model = None
    if settings.topology.on_memory:
        model = predict(settings.topology, size, choose(settings.topology, size))[0] * 1e6
    gloo = [float(np.median(t)) for t in found.get("gloo", [])]
    rows = []
    for name, rounds in found.items():
        medians = [float(np.median(t)) for t in rounds]
        seconds = float(np.median(medians))
        algbw = size / seconds / 1e9
        n = settings.ranks
        ratio = (
            float(np.median([g / m for g, m in zip(gloo, medians, strict=True)])) if gloo else None
        )
        rows.append(
            Row(
                size, size // 4, "float", "sum", name, seconds * 1e6, algbw,
                algbw * 2 * (n - 1) / n, wrong[name],
                model if name.startswith("linkweave") else None, state,
                min(medians) * 1e6, max(medians) * 1e6, ratio,
            )
        )  # fmt: skip
    return rows


def as_json_text(settings: Settings, rows: list[Row]) -> str:
    """JSON of the figures and of what they depend on."""
    report = {
        "benchmark": "allreduce",
        "ranks": settings.ranks,
        "topology": settings.topology.name,
        "rounds": settings.rounds,
        "sched_batch": settings.batch,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(report, indent=1)
