"""What profilers and readers are told of a communicator's calls: NVTX ranges, `LINKWEAVE_DEBUG`.

Ranges are named `allreduce/overlapped_double_tree/64MiB`, in the domain linkweave (a sparse one
`sparse_allreduce/gtopk/25000`, after its k); with
`LINKWEAVE_NVTX=phases` the phases of a call have ranges of their own inside. `LINKWEAVE_DEBUG` from
1 to 5 prints one layer more a level: the choice of an algorithm and why; each call; plans; kernels;
each flag awaited and raised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from collectives.errors import CollectiveError
from collectives.planning.explain import explain, size_text
from collectives.planning.plan import Op, Plan
from topology import Topology

CHOICE, CALLS, PLANS, KERNELS, FLAGS = range(1, 6)


def label(kind: str, algorithm: str, nbytes: int) -> str:
    """A call's name."""
    return f"{kind}/{algorithm}/{size_text(nbytes).replace(' ', '')}"


class Trace:
    """One rank's. Raises CollectiveError where a variable makes no sense."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self.rank = rank
        self.level = _one_of(environ, "LINKWEAVE_DEBUG", ("0", "1", "2", "3", "4", "5"))
        self._phases = _one_of(environ, "LINKWEAVE_NVTX", ("calls", "phases"))

    def call(self, name: str) -> AbstractContextManager[object]:
        """A range round one call; `name` is its `label`."""
        return _annotate(name)

    def phase(self, name: str) -> AbstractContextManager[object]:
        return _annotate(name) if self._phases else nullcontext()

    def say(self, level: int, text: str) -> None:
        """Print where `LINKWEAVE_DEBUG` is at least `level`; each line tells its rank."""
        if level <= self.level:
            lines = (f"linkweave[{self.rank}] {line}\n" for line in text.splitlines())
            sys.stderr.write("".join(lines))

    def planned(self, name: str, plan: Plan, topology: Topology, nbytes: int) -> None:
        """Say which plan a new kind of call takes, and why."""
        if self.level >= CHOICE:
            self.say(CHOICE, f"{name} on {topology.name}: {plan.num_chunks} chunks. "
                     f"{_why(plan, topology, nbytes)}")  # fmt: skip
            self.say(PLANS, str(plan))

    def flags(self, plan: Plan) -> None:
        """Say each flag of one call, in the order in which each of our streams takes them."""
        if self.level >= FLAGS:
            for line in flags(plan, self.rank):
                self.say(FLAGS, line)


def _why(plan: Plan, topology: Topology, nbytes: int) -> str:
    if plan.collective != "allreduce":
        return f"{plan.algorithm} serves every size"
    found = explain(topology, nbytes)
    if found.choice == plan.algorithm:
        return found.reason
    return f"asked for, or order='fixed'; else {found.choice}: {found.reason}"


def flags(plan: Plan, rank: int) -> Iterator[str]:
    """Each flag that a rank awaits or raises, a line each; streams run beside each other."""
    for stream in plan.streams:
        if stream.rank != rank:
            continue
        for at, chunk, step in plan.steps(stream):
            if step.op not in (Op.WAIT, Op.SIGNAL):
                continue
            for index in step.connections:
                c = plan.connections[index]
                sender = plan.sends_on(stream, index)
                data = sender == (step.op is Op.SIGNAL)
                yield (
                    f"channel {stream.channel} step {at}: "
                    f"{'awaits' if step.op is Op.WAIT else 'raises'} "
                    f"{'data' if data else 'slot free'} of chunk {chunk}, "
                    f"rank {c.dst if sender else c.src}"
                )


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> int:
    """The place of a variable's value among those allowed; the first where it is not set."""
    value = environ.get(name, allowed[0])
    if value not in allowed:
        raise CollectiveError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return allowed.index(value)


def _annotate(name: str) -> AbstractContextManager[object]:
    nvtx = _nvtx()
    return nvtx.annotate(name, domain="linkweave") if nvtx else nullcontext()


@cache
def _nvtx() -> Any:
    """None where it is not installed: the program runs without."""
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx
