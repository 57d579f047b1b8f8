"""NVTX ranges for profilers, and debug output, about a communicator's calls.

Each call is a range in the domain linkweave, named kind/algorithm/size, for example
`allreduce/overlapped_double_tree/64MiB`; a sparse call is named after its mode and k, for example
`sparse_allreduce/gtopk/25000`; a call on several machines `allreduce/along/4KiB` if it goes along
with the comparison, or else `allreduce/network/64MiB`. With `LINKWEAVE_NVTX=phases` the phases of a
call are nested ranges.

`LINKWEAVE_DEBUG=n` prints to stderr. Level 1 prints which algorithm is chosen and why; 2, each
call; 3, plans; 4, kernels; 5, each flag awaited or raised. Each level includes those below it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.explain import explain, size_text
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.diagnose import position_of
from linkweave.collectives.runtime.encoded import Encoded
from linkweave.kernels.nvtx_ranges import annotate
from linkweave.topology import Topology

_RANGES = 512  # cached ranges
CHOICE, CALLS, PLANS, KERNELS, FLAGS = range(1, 6)


@lru_cache(maxsize=_RANGES)  # some calls are labelled each time
def label(kind: str, algorithm: str, nbytes: int) -> str:
    """The name of a call in traces."""
    return f"{kind}/{algorithm}/{size_text(nbytes).replace(' ', '')}"


class Trace:
    """Traces one rank. Raises CollectiveError if an environment variable has a bad value."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self.rank = rank
        self.level = _one_of(environ, "LINKWEAVE_DEBUG", ("0", "1", "2", "3", "4", "5"))
        self._ranges: dict[str, AbstractContextManager[object]] = {}
        self._phases = _one_of(environ, "LINKWEAVE_NVTX", ("calls", "phases"))

    def call(self, name: str) -> AbstractContextManager[object]:
        """A range around one call, named by its `label`. Ranges of a `Trace` must not overlap."""
        if name not in self._ranges:
            if len(self._ranges) >= _RANGES:
                self._ranges.clear()
            self._ranges[name] = annotate(name)
        return self._ranges[name]

    @property
    def wants_more(self) -> bool:
        """Whether more than a range around each call is asked for."""
        return bool(self.level or self._phases)

    def phase(self, name: str) -> AbstractContextManager[object]:
        return annotate(name) if self._phases else nullcontext()

    def say(self, level: int, text: str) -> None:
        """Print if `LINKWEAVE_DEBUG` is at least `level`. Each line names the rank."""
        if level <= self.level:
            lines = (f"linkweave[{self.rank}] {line}\n" for line in text.splitlines())
            sys.stderr.write("".join(lines))

    def planned(self, name: str, plan: Plan, topology: Topology, nbytes: int) -> None:
        """Print which plan a new kind of call uses, and why."""
        if self.level >= CHOICE:
            self.say(CHOICE, f"{name} on {topology.name}: {plan.num_chunks} chunks. "
                     f"{_why(plan, topology, nbytes)}")  # fmt: skip
            self.say(PLANS, str(plan))

    def flags(self, encoded: Callable[[], Encoded], num_chunks: int) -> None:
        """Print each flag of one call, track by track."""
        if self.level >= FLAGS:
            for line in flags(encoded(), self.rank, num_chunks):
                self.say(FLAGS, line)


def _why(plan: Plan, topology: Topology, nbytes: int) -> str:
    if not plan.definition.tunable:
        return f"{plan.algorithm} serves every size"
    found = explain(topology, nbytes)
    if found.choice == plan.algorithm:
        return found.reason
    return f"asked for, or order='fixed'; else {found.choice}: {found.reason}"


def flags(encoded: Encoded, rank: int, num_chunks: int) -> Iterator[str]:
    """One line for each flag that a rank awaits or raises. Tracks run concurrently."""
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
    """The index of a variable's value in `allowed`; 0 if it is not set."""
    value = environ.get(name, allowed[0])
    if value not in allowed:
        raise CollectiveError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return allowed.index(value)
