"""`linkweave bench algorithms`: all algorithms on CPU ranks, beside the one the model chooses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.allreduce import Settings
from linkweave.bench.peers import timed
from linkweave.bench.timing import machine, schedule
from linkweave.collectives import CollectiveError
from linkweave.collectives.launch.default import get_default
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose, plan_allreduce, predict
from linkweave.topology import Topology
from linkweave.topology.timings import Timing

BUDGET_BYTES = 1 << 26  # of an algorithm's messages in one round; from one to fifty calls
HOPELESS = 30  # times the least predicted time: not run at all
SLOW = 20  # times the fastest first run: not timed


@dataclass(frozen=True, slots=True)
class Comparison:
    """One size. Ratios are medians over the rounds, each within its round: states of the machine
    that last longer than a round cancel out."""

    nbytes: int
    choice: str
    """What the cost model takes."""
    timings: dict[str, Timing]
    ratios: dict[str, float]
    """The choice's time over each algorithm's."""

    @property
    def best(self) -> str:
        """The algorithm that gains most over the choice."""
        return max(self.ratios, key=lambda name: self.ratios[name])


def run(
    settings: Settings, progress: Callable[[Comparison], None] = lambda row: None
) -> list[Comparison]:
    """Measure every size; all algorithms take turns within each round.

    `progress` is called with each size's comparison, in the process of rank 0. Raises
    CollectiveError, also where a sum is wrong.
    """
    for size in settings.sizes:
        for name in candidates(settings.topology):
            plan_allreduce(settings.topology, size, name)  # forked ranks need not plan it again
    before = os.sched_getscheduler(0)
    try:
        schedule(settings.batch)  # the ranks inherit it
        found = collectives.spawn(
            _rank, settings.ranks, settings.topology, (settings, progress), timeout=120.0
        )
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
    rows: list[Comparison] = found[0]
    return rows


def _rank(
    rank: int, settings: Settings, progress: Callable[[Comparison], None]
) -> list[Comparison]:
    rows = []
    for size in settings.sizes:
        row = _compare(size, settings)
        if rank == 0:
            progress(row)
        rows.append(row)
    return rows


def _compare(size: int, settings: Settings) -> Comparison:
    comm = get_default()
    choice = choose(settings.topology, size)
    pattern = (np.arange(size // 4) % 251).astype(np.float32)
    mine = pattern + np.float32(comm.rank)
    want = pattern * comm.size + np.float32(comm.size * (comm.size - 1) // 2)
    buffer = np.empty_like(mine)

    def seconds(name: str, calls: int) -> list[float]:
        """Of each call, on the slowest rank."""
        call = partial(comm.allreduce, buffer, algorithm=name)
        times = np.array(timed(call, partial(np.copyto, buffer, mine), comm.barrier, calls))
        comm.allreduce(times, "max")
        found: list[float] = times.tolist()
        return found

    def first_run(name: str) -> float:
        """Checked; the call before it lays out what the plan needs and touches the memory."""
        time = seconds(name, 2)[-1]
        wrong = np.array([int((buffer != want).sum())], np.int64)
        comm.allreduce(wrong)
        if wrong[0]:
            raise CollectiveError(f"{name}, {size_text(size)}: {wrong[0]} elements were wrong")
        return time

    first = {name: first_run(name) for name in _hopeful(settings.topology, size)}
    limit = SLOW * min(first.values())
    names = [name for name in first if first[name] <= limit or name == choice]
    calls = max(1, min(50, BUDGET_BYTES // size))
    rounds = []
    for number in range(settings.rounds):
        turns = names[::-1] if number % 2 else names  # who comes early in one comes late in another
        rounds.append({name: float(np.median(seconds(name, calls))) for name in turns})
    return _comparison(size, settings.topology, choice, rounds)


def _hopeful(machine: Topology, size: int) -> list[str]:
    """The algorithms that are worth a run, and the one that is chosen."""
    predicted = {name: predict(machine, size, name)[0] for name in candidates(machine)}
    limit = HOPELESS * min(predicted.values())
    choice = choose(machine, size)
    return [name for name in predicted if predicted[name] <= limit or name == choice]


def _comparison(
    size: int, machine: Topology, choice: str, rounds: list[dict[str, float]]
) -> Comparison:
    timings, ratios = {}, {}
    for name in rounds[0]:
        chunks = plan_allreduce(machine, size, name).num_chunks
        seconds = float(np.median([times[name] for times in rounds]))
        timings[name] = Timing(name, size, chunks, seconds)
        ratios[name] = float(np.median([times[choice] / times[name] for times in rounds]))
    return Comparison(size, choice, timings, ratios)


def header(settings: Settings) -> str:
    """What was run, on what, and the columns with their units."""
    info = machine()
    batch = "SCHED_BATCH" if settings.batch else "default scheduling"
    names = [name.split("_") for name in candidates(settings.topology)]
    height = max(map(len, names))
    columns = zip(*([""] * (height - len(n)) + n for n in names), strict=True)
    *above, last = ("".join(f"{word:>12}" for word in words) for words in columns)
    left = f"{'size':>10}  {'model takes':22}{'us':>10}  {'fastest':22}{'us':>10}{'ratio':>7}"
    return "\n".join([
        f"# all-reduce, {settings.ranks} CPU ranks on {settings.topology.name}, {batch}, "
        f"{settings.rounds} rounds",
        f"# {info['cores']} cores, {info['cpu']}, Linux {info['kernel']}",
        "# us: median over rounds of each round's median of the slowest rank; ratio: median of the",
        "# rounds' ratios of the model's choice to the fastest; -: hopeless at this size",
        *(" " * len(left) + words for words in above),
        left + last,
    ])  # fmt: skip


def line(row: Comparison, names: tuple[str, ...]) -> str:
    """One size; times of all `names` at the end."""
    times = {name: f"{timing.seconds * 1e6:.1f}" for name, timing in row.timings.items()}
    both = "".join(f"  {name:22}{times[name]:>10}" for name in (row.choice, row.best))
    return (
        f"{size_text(row.nbytes):>10}{both}{row.ratios[row.best]:7.2f}"
        + "".join(f"{times.get(name, '-'):>12}" for name in names)
    )  # fmt: skip


def as_json_text(settings: Settings, rows: list[Comparison]) -> str:
    """The times, with what they depend on beside the code."""
    report: dict[str, Any] = {
        "format": "linkweave-timings",
        "version": 1,
        "topology": settings.topology.name,
        "machine": machine(),
        "rows": [asdict(timing) for row in rows for timing in row.timings.values()],
    }
    return json.dumps(report, indent=1)
