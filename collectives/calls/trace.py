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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.explain import explain, size_text
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.diagnose import position_of
from linkweave.collectives.runtime.encoded import Encoded
from linkweave.topology import Topology

_RANGES = 512  # names that are kept
CHOICE, CALLS, PLANS, KERNELS, FLAGS = range(1, 6)


def label(kind: str, algorithm: str, nbytes: int) -> str:
    """A call's name."""
    return f"{kind}/{algorithm}/{size_text(nbytes).replace(' ', '')}"


class Trace:
    """One rank's. Raises CollectiveError where a variable makes no sense."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self.rank = rank
        self.level = _one_of(environ, "LINKWEAVE_DEBUG", ("0", "1", "2", "3", "4", "5"))
        self._ranges: dict[str, AbstractContextManager[object]] = {}
        self._phases = _one_of(environ, "LINKWEAVE_NVTX", ("calls", "phases"))

    def call(self, name: str) -> AbstractContextManager[object]:
        """A range round one call; `name` is its `label`. Calls of one `Trace` follow each other."""
        if name not in self._ranges:
            if len(self._ranges) >= _RANGES:
                self._ranges.clear()
            self._ranges[name] = _annotate(name)
        return self._ranges[name]

    @property
    def wants_more(self) -> bool:
        """Whether someone asked for more than a range round each call."""
        return bool(self.level or self._phases)

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

    def flags(self, encoded: Callable[[], Encoded], num_chunks: int) -> None:
        """Say each flag of one call, in the order in which each of our tracks takes them."""
        if self.level >= FLAGS:
            for line in flags(encoded(), self.rank, num_chunks):
                self.say(FLAGS, line)


def _why(plan: Plan, topology: Topology, nbytes: int) -> str:
    if plan.collective != "allreduce":
        return f"{plan.algorithm} serves every size"
    found = explain(topology, nbytes)
    if found.choice == plan.algorithm:
        return found.reason
    return f"asked for, or order='fixed'; else {found.choice}: {found.reason}"


def flags(encoded: Encoded, rank: int, num_chunks: int) -> Iterator[str]:
    """Each flag that a rank awaits or raises, a line each; tracks run beside each other."""
    code = encoded.codes[rank].tolist()
    phases = code[1]
    for row, channel in enumerate(encoded.channels[rank]):
        offsets = code[2 + row * (phases + 1) : 2 + (row + 1) * (phases + 1)]
        for first, stop in zip(offsets, offsets[1:], strict=False):
            for group in range(0, num_chunks, encoded.stride):
                step, pc = position_of(code, offsets[0], first), first
                while pc < stop:
                    op, chunk, sender, _, n = code[pc : pc + 5]
                    if op in (Op.WAIT, Op.SIGNAL) and group + chunk < num_chunks:
                        data = bool(sender) == (op == Op.SIGNAL)
                        yield (
                            f"channel {channel} step {step}: "
                            f"{'awaits' if op == Op.WAIT else 'raises'} "
                            f"{'data' if data else 'slot free'} of chunk {group + chunk}, "
                            f"rank {encoded.ends[code[pc + 5]][1 if sender else 0]}"
                        )
                    step, pc = step + 1, pc + 5 + n


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
