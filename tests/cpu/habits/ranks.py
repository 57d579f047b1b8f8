"""Runs habits on ranks, all of a mode after one another, and says how each went.

Each rank writes what a habit led to into a file. A habit that does not return ends its ranks, at a
deadline; the others go on in new ones.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from linkweave import collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import Network, plan
from linkweave.collectives.training import tuner
from tests.cpu.habits.run import HABITS, Habit, Mode, Run

bytescheduler: Any = importlib.import_module("linkweave.collectives.overlap.policies.bytescheduler")
TIMEOUT = 5.0
"""Seconds after which ranks that wait for each other raise an error."""
DEADLINE = 100.0
"""Seconds after which a habit is taken to hang."""
SLOW = Network(2e-4, 1e-6, 1.5, 2)
"""On which an all-reduce of a layer takes about as long as its backward pass."""


def quick_plan(profile: Any, network: Any, policy: str, **_: Any) -> Any:
    """The plan of a policy; in place of the search of "auto", another that is chained."""
    return plan(profile, network, "bytescheduler" if policy == "auto" else policy)


QUICK: dict[Any, dict[str, Any]] = {
    tuner: {
        "WARM_UP": 0,
        "MEASURED": 2,
        "TRIED": 3,
        "LEFT": (),
        "FINALISTS": 2,
        "NAMED": ("wfbp", "ddp"),
        "plan": quick_plan,
    },
    bytescheduler: {"PARTITIONS": (256,), "CREDITS": (2,)},
}
"""So few steps that "auto" has settled after 15, few policies to choose from, and pieces of small
layers."""


@dataclass
class Outcome:
    """What a habit led to on a rank."""

    error: str = ""
    ours: bool = False  # whether it is an error of linkweave
    trace: str = ""
    chained: bool = False
    seconds: float = 0.0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    same: dict[str, torch.Tensor] = field(default_factory=dict)
    means: dict[str, torch.Tensor] = field(default_factory=dict)


# ---- on a rank -----------------------------------------------------------------------------------
def carry_out(one: Habit, run: Run) -> Outcome:
    """Runs a habit in this process."""
    outcome = Outcome()
    begun = time.perf_counter()
    torch.manual_seed(0)
    try:
        one.body(run)
        run.look()
        outcome.parameters = run.parameters()
        outcome.same, outcome.means = run.same_everywhere, run.averages
    except BaseException as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.ours = isinstance(error, CollectiveError)
        outcome.trace = traceback.format_exc()
        run.look()
    try:
        run.close()
    except BaseException as error:
        if not outcome.error:
            outcome.error = f"close: {type(error).__name__}: {error}"
            outcome.trace = traceback.format_exc()
    outcome.chained = run.chained
    outcome.seconds = time.perf_counter() - begun
    return outcome


def be_quick(mode: Mode) -> None:
    """Plans with few steps, for a slow network. Only in the processes of ranks."""
    changes = {module: dict(values) for module, values in QUICK.items()}
    if "exchange" not in mode.options:
        changes[tuner]["measure_network"] = lambda *_: SLOW
    if mode.chains == "maybe":  # two chained ones that are equal, and one that is not chained
        changes[tuner]["FINALISTS"] = 3
    for module, values in changes.items():
        for name, value in values.items():
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, value)


def all_of_a_rank(
    rank: int, size: int, ranks: int, names: Sequence[str], mode: Mode, folder: Path, barrier: Any
) -> None:
    """Runs the habits, as one of `size` ranks, each with a communicator of its own."""
    be_quick(mode)
    comm = collectives.get_default() if size > 1 else None
    stacks = (folder / f"stacks-{rank}").open("w")
    for name in names:
        barrier.wait(DEADLINE + 5)  # ranks may be apart, after an error of one
        part = comm.split() if comm is not None else None
        number = [*HABITS].index(name)
        (folder / f"{number}-{rank}.begun").touch()
        faulthandler.dump_traceback_later(DEADLINE, exit=True, file=stacks)
        run = Run(mode, rank, size, ranks, part)
        outcome = carry_out(HABITS[name], run)
        del run
        if part is not None:
            part.close()
        faulthandler.cancel_dump_traceback_later()
        path = folder / f"{number}-{rank}"
        torch.save(outcome, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


# ---- in the process of the tests -----------------------------------------------------------------
def run_all(
    names: Sequence[str], mode: Mode, size: int, ranks: int, folder: Path
) -> dict[str, list[Outcome]]:
    """The outcomes of the habits, by rank; one process, of `size` 1, stands for all `ranks`."""
    found: dict[str, list[Outcome]] = {}
    left = [*names]
    while left:
        said = start(left, mode, size, ranks, folder)
        again = []
        for name in left:
            number = [*HABITS].index(name)
            outcomes = [read(folder / f"{number}-{rank}") for rank in range(size)]
            begun = any((folder / f"{number}-{rank}.begun").exists() for rank in range(size))
            if begun:
                stacks = "\n".join((folder / f"stacks-{rank}").read_text() for rank in range(size))
                late = Outcome(f"hang: no answer; {said}", trace=stacks)
                found[name] = [one or late for one in outcomes]
            else:
                again.append(name)
        if len(again) == len(left):
            raise RuntimeError(f"ranks do not start: {said}")
        left = again
    return found


def start(names: Sequence[str], mode: Mode, size: int, ranks: int, folder: Path) -> str:
    """Starts ranks for the habits; what ended them early, if anything did."""
    barrier = multiprocessing.get_context("fork").Barrier(size)

    def body(rank: int) -> None:
        all_of_a_rank(rank, size, ranks, names, mode, folder, barrier)

    try:
        collectives.spawn(body, size, timeout=TIMEOUT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def read(path: Path) -> Outcome | None:
    return torch.load(path, weights_only=False) if path.exists() else None


# ---- what is right -------------------------------------------------------------------------------
def fault(one: Habit, mode: Mode, ranks: Sequence[Outcome], alone: Outcome) -> str:
    """What is wrong with a habit's outcomes; empty if nothing is."""
    if alone.error:
        return f"in one process: {alone.error}\n{alone.trace}"
    errors = [outcome.error for outcome in ranks]
    wanted = one.error
    if not wanted and mode.chains != "no":
        wanted = one.chained_error
    raised = any(errors)
    if wanted and not raised and mode.chains == "maybe" and not one.error:
        wanted = ""  # it was not chained at that time
    if wanted and not raised:
        return f"no error, where {wanted!r} is expected; {apart(mode, ranks, alone) or 'equal'}"
    if raised and not wanted:
        return "\n".join(
            f"rank {rank}: {outcome.error or 'no error'}\n{outcome.trace}"
            for rank, outcome in enumerate(ranks)
        )
    return wrong_error(one, wanted, ranks) if wanted else apart(mode, ranks, alone)


def wrong_error(one: Habit, wanted: str, ranks: Sequence[Outcome]) -> str:
    """How errors differ from the one that is expected."""
    by = range(len(ranks)) if one.by is None else [one.by]
    said = "; ".join(f"rank {r}: {outcome.error or 'none'}" for r, outcome in enumerate(ranks))
    if not any(re.search(wanted, ranks[r].error) for r in by):
        return f"another error than {wanted!r}: {said}"
    if any(outcome.error and not outcome.ours for outcome in ranks):
        return f"an error that is not linkweave's: {said}"
    if one.by is None and not all(outcome.error for outcome in ranks):
        return f"not all ranks have an error: {said}"
    return ""


def apart(mode: Mode, ranks: Sequence[Outcome], alone: Outcome) -> str:
    """Where ranks differ from each other or from one process."""
    first = ranks[0]
    for what in ("parameters", "same"):
        want = getattr(alone, what)
        for rank, outcome in enumerate(ranks):
            mine = getattr(outcome, what)
            if mine.keys() != want.keys():
                return f"rank {rank} has {[*mine]}, one process {[*want]}"
        for name, value in want.items():
            for rank, outcome in enumerate(ranks):
                mine = getattr(outcome, what)[name]
                if mine.shape != value.shape or mine.dtype != value.dtype:
                    return f"{name} is {mine.dtype} {tuple(mine.shape)} on rank {rank}"
                if bits(mine) != bits(getattr(first, what)[name]):
                    spread = distance(mine, getattr(first, what)[name])
                    return f"silent: {name} of ranks 0 and {rank} differ by {spread:.2g}"
                if not (error := distance(mine, value)) <= tolerance(value):
                    return f"silent: {name} differs from one process by {error:.2g}"
    for name, value in alone.means.items():
        mean = sum(outcome.means[name] for outcome in ranks) / len(ranks)
        if not (error := distance(mean, value)) <= mode.tolerance:
            return f"silent: the mean of {name} differs from one process by {error:.2g}"
    return ""


def tolerance(x: torch.Tensor) -> float:
    """By which values of one process may differ."""
    return 1e-5 if x.dtype == torch.float32 else 1e-10


def distance(a: Any, b: Any) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max()) if a.numel() else 0.0


def bits(x: torch.Tensor) -> bytes:
    flat = x.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
