"""All ranks of a plan on one GPU, run by one launch: the same kernel and plan as on many.

What stands between the ranks is the device's own memory, so this shows the kernel right and how
fast it moves bytes, not how fast links are; `ps_per_byte` emulates those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from collectives.planning.plan import Op, Plan
from collectives.runtime import program
from collectives.runtime.diagnose import Blocked, position_of
from collectives.runtime.program import CURSOR, GROUP, REPORT, Program, Shape, State
from collectives.runtime.shm import place_of

MOST_LANES = 8
"""Blocks a stream; with 8 ranks of 4 streams each, more than an H100's 132 multiprocessors."""


class Device(Protocol):
    """What is asked of a GPU (`kernels.device.CudaDevice`); addresses are integers."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def upload(self, array: NDArray[np.generic]) -> int: ...
    def pinned(self, words: int) -> NDArray[np.uint32]: ...
    def resident(self, dtype: str, op: str) -> int: ...
    def launch(
        self, dtype: str, op: str, launch: NDArray[np.void], blocks: int, stream: int
    ) -> None: ...
    def synchronise(self, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Region:
    """One plan's counters, slots and programs; it serves all its numbers of chunks."""

    programs: tuple[tuple[int, Program], ...]
    groups: NDArray[np.void]  # [streams of all ranks] of GROUP, all but `place` filled in
    report: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A collective of one size, ready to be launched any number of times."""

    plan: Plan
    shape: Shape
    dtype: str
    op: str
    groups: int
    programs: tuple[tuple[int, Program], ...]
    report: NDArray[np.uint32]


class VirtualRanks:
    """Runs plans for all their ranks on one device. A context manager.

    `timeout` (s) bounds every wait; `max_blocks` caps the blocks of a launch. After a failure it
    must be closed.
    """

    def __init__(
        self, device: Device, timeout: float = 30.0, max_blocks: int | None = None
    ) -> None:
        self.device, self.timeout, self.max_blocks = device, timeout, max_blocks
        self._abort = device.pinned(1)
        self._memory: list[int] = []
        self._regions: dict[tuple[Plan, Shape], _Region] = {}
        self._launched: list[Prepared] = []

    def prepare(self, plan: Plan, nbytes: int, dtype: str, op: str) -> Prepared:
        """Memory and tables for a verified plan. Raises CollectiveError where the device cannot
        hold all blocks at once."""
        streams = len(plan.streams)
        room = self.device.resident(dtype, op)
        most = room if self.max_blocks is None else min(room, self.max_blocks)
        if streams > most:
            raise CollectiveError(
                f"{plan.algorithm} needs {streams} thread blocks for {plan.size} ranks at once; "
                f"the GPU holds {room}"
                + ("" if self.max_blocks is None else f", max_blocks is {self.max_blocks}")
            )
        lanes = min(MOST_LANES, max(1, most // max(1, streams)))
        plan, shape = program.fit(plan, nbytes, lanes)
        region = self._region(plan, shape)
        groups = region.groups.copy()
        places = {
            rank: self._upload(place_of(plan, nbytes, rank))
            for rank in {rank for rank, _ in region.programs}
        }
        for row in groups:
            row["place"] = places[int(row["rank"])]
        table = self._upload(groups)
        return Prepared(plan, shape, dtype, op, table, region.programs, region.report)

    def run(
        self, prepared: Prepared, buffers: Sequence[int], stream: int = 0, ps_per_byte: int = 0
    ) -> None:
        """Enqueue one collective, in place on one buffer (an address) for each rank.

        Returns at once; `check` tells whether it went well. Buffers are aligned to their elements.
        """
        if len(buffers) != prepared.plan.size:
            raise CollectiveError(
                f"{len(buffers)} buffers for a plan of {prepared.plan.size} ranks"
            )
        if not prepared.programs:
            return
        launch = program.launch(
            prepared.plan, prepared.shape, prepared.groups, int(self._abort.ctypes.data), buffers,
            self.timeout, prepared.op == "avg", ps_per_byte,
        )  # fmt: skip
        blocks = len(prepared.programs) * prepared.shape.lanes
        self.device.launch(prepared.dtype, prepared.op, launch, blocks, stream)
        if not any(p is prepared for p in self._launched):
            self._launched.append(prepared)

    def check(self, stream: int = 0) -> None:
        """Wait for what was enqueued. Raises CollectiveTimeout naming who waited for whom, or
        CollectiveAborted."""
        self.device.synchronise(stream)
        if not self._abort[0]:
            return
        found = [w for p in self._launched for w in standing(p)]
        if State.TIMED_OUT not in {state for state, _ in found}:
            raise CollectiveAborted("the launch was aborted" + _others(found, None))
        waiting = {blocked.rank for _, blocked in found}
        # the end of the chain of those who wait: its peer waits for nobody
        first = next((b for _, b in found if b.peer not in waiting), found[0][1])
        words = f"{first} for {self.timeout:g} s" + _others(found, first)
        raise CollectiveTimeout(words, **first.fields())

    def abort(self) -> None:
        """Free the device: every wait ends, now and later."""
        self._abort[0] = 1

    def close(self) -> None:
        """Give all memory back; nothing may be running. May be repeated."""
        while self._memory:
            self.device.free(self._memory.pop())
        self._regions.clear()

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- memory ------------------------------------------------------------------------------
    def _upload(self, array: NDArray[np.generic]) -> int:
        self._memory.append(self.device.upload(array))
        return self._memory[-1]

    def _region(self, plan: Plan, shape: Shape) -> _Region:
        key = (plan.with_chunks(plan.stride), shape)
        if key not in self._regions:
            self._regions[key] = self._lay_out(plan, shape)
        return self._regions[key]

    def _lay_out(self, plan: Plan, shape: Shape) -> _Region:
        layout = program.lay_out(plan, shape)
        bases = [self.device.allocate(nbytes) for nbytes in layout.nbytes]
        self._memory += bases
        found = tuple((r, p) for r in range(plan.size) for p in program.programs(plan, r))
        report = self.device.pinned(max(1, len(found) * shape.lanes * REPORT))
        groups = np.zeros(len(found), GROUP)
        for i, (row, (rank, p)) in enumerate(zip(groups, found, strict=True)):
            row["code"] = self._upload(p.code)
            row["ends"] = self._upload(program.ends(plan, layout, p, bases))
            row["cursors"] = self._upload(np.zeros((shape.lanes, len(p.ends)), CURSOR))
            row["report"] = report.ctypes.data + 4 * i * shape.lanes * REPORT
            row["rank"], row["num_ends"], row["code_words"] = rank, len(p.ends), p.code.size
        return _Region(found, groups, report)


def standing(prepared: Prepared) -> list[tuple[State, Blocked]]:
    """Where each lane stands that had to stop or has waited long."""
    found = []
    used = prepared.report[: len(prepared.programs) * prepared.shape.lanes * REPORT]
    rows = used.reshape(-1, prepared.shape.lanes, REPORT)
    for (rank, p), lanes in zip(prepared.programs, rows, strict=True):
        for state, _, group, pc in lanes.tolist():
            if state in (State.WAITS, State.TIMED_OUT, State.ABORTED):
                found.append((State(state), _blocked(prepared.plan, rank, p, group, pc)))
    return found


def _blocked(plan: Plan, rank: int, p: Program, group: int, pc: int) -> Blocked:
    """The step at which a program stands: a WAIT, or one that polls its slots' lines."""
    code = p.code.tolist()
    op, chunk, flag, source, n = code[pc : pc + 5]
    ends = code[pc + 5 : pc + 5 + n]
    # of a REDUCE over lines, which of its peers is missing is not known: the first is named
    connection = plan.connections[p.ends[source if op == Op.SEND and source >= 0 else ends[0]]]
    sender = op == Op.WAIT and bool(flag & 1)
    return Blocked(
        rank,
        connection.dst if sender else connection.src,
        p.stream.channel,
        position_of(code, code[1], pc),
        group * plan.stride + chunk,
        "a free slot" if sender else "the data",
    )


def _others(found: Sequence[tuple[State, Blocked]], first: Blocked | None) -> str:
    """One line for each rank beside the first one's."""
    seen = set() if first is None else {first.rank}
    words = ""
    for _, blocked in found:
        if blocked.rank not in seen:
            seen.add(blocked.rank)
            words += f"; {blocked}"
    return words
