"""`linkweave bench algorithms`: every algorithm on CPU ranks, and the model's choice."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from linkweave import collectives
from linkweave.bench.collectives import Settings
from linkweave.bench.peers import timed
from linkweave.bench.timing import machine, schedule
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose, plan_allreduce, predict
from linkweave.topology import Topology
from linkweave.topology.timings import Timing

BUDGET_BYTES = 1 << 26  # that an algorithm moves in one round, in 1 to 50 calls
HOPELESS = 30  # an algorithm predicted to take this many times the least time is not run
LEGEND = ""
SLOW = 20  # an algorithm whose first run takes this many times the fastest is not timed


@dataclass(frozen=True, slots=True)
class Comparison:
    """All algorithms at one size.

    A ratio compares times of the same round, and its median over the rounds is given, so that
    states of the machine that last longer than a round cancel out.
    """

    nbytes: int
    choice: str  # the cost model's choice
    timings: dict[str, Timing]
    ratios: dict[str, float]  # the choice's time over each algorithm's

    def __str__(self) -> str:
        """One size, and beneath it the times of the other algorithms."""
        us = {name: f"{timing.seconds * 1e6:.1f}" for name, timing in self.timings.items()}
        both = "".join(f"  {name:22}{us[name]:>10}" for name in (self.choice, self.best))
        text = f"{size_text(self.nbytes):>10}{both}{self.ratios[self.best]:7.2f}"
        others = ", ".join(f"{n} {us[n]}" for n in us if n not in (self.choice, self.best))
        indent = " " * 12
        return "\n".join([text, *textwrap.wrap(f"others: {others}", 100, initial_indent=indent,
                                               subsequent_indent=indent)])  # fmt: skip

    @property
    def written(self) -> Iterable[Timing]:
        """What a file of figures has of it."""
        return self.timings.values()

    @property
    def best(self) -> str:
        """The algorithm that gains most over the choice."""
        return max(self.ratios, key=lambda name: self.ratios[name])


def run(settings: Settings) -> Iterator[Comparison]:
    """Measure every size; all algorithms take turns within each round.

    Raises CollectiveError, also for a wrong sum.
    """
    for size, name in product(settings.sizes, candidates(settings.topology)):
        plan_allreduce(settings.topology, size, name)  # forked ranks need not plan it again
    before = os.sched_getscheduler(0)
    try:
        schedule(settings.batch)  # the ranks inherit it
        for size in settings.sizes:
            yield collectives.spawn(
                _compare, settings.ranks, settings.topology, (size, settings), timeout=120.0
            )[0]
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def _compare(rank: int, size: int, settings: Settings) -> Comparison:
    comm = get_default()
    choice = choose(settings.topology, size)
    pattern = (np.arange(size // 4) % 251).astype(np.float32)
    mine = pattern + np.float32(comm.rank)
    want = pattern * comm.size + np.float32(comm.size * (comm.size - 1) // 2)
    buffer = np.empty_like(mine)

    def seconds(name: str, calls: int) -> list[float]:
        """Seconds of each call on the slowest rank."""
        call = partial(comm.allreduce, buffer, algorithm=name)
        times = np.array(timed(call, partial(np.copyto, buffer, mine), comm.barrier, calls))
        comm.allreduce(times, "max")
        found: list[float] = times.tolist()
        return found

    def first_run(name: str) -> float:
        """Seconds of the second call, which is checked; the first one sets everything up."""
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
        turns = names[::-1] if number % 2 else names
        rounds.append({name: float(np.median(seconds(name, calls))) for name in turns})
    return _comparison(size, settings.topology, choice, rounds)


def _hopeful(machine: Topology, size: int) -> list[str]:
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
    info = machine()
    batch = "SCHED_BATCH" if settings.batch else "default scheduling"
    return "\n".join([
        f"# all-reduce, {settings.ranks} CPU ranks on {settings.topology.name}, {batch}, "
        f"{settings.rounds} rounds",
        f"# {info['cores']} cores, {info['cpu']}, Linux {info['kernel']}",
        "# us: median over rounds of each round's median of the slowest rank; ratio: median of the",
        "# rounds' ratios of the model's choice to the fastest; others: those worth a run",
        f"{'size':>10}  {'model takes':22}{'us':>10}  {'fastest':22}{'us':>10}{'ratio':>7}",
    ])  # fmt: skip
