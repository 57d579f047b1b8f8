"""Ranks of this process on its GPUs: one launch a GPU runs a collective for all ranks on it.

With all ranks of a plan on one GPU ("virtual ranks") what stands between them is the device's own
memory: that shows the kernel right and how fast it moves bytes, not how fast links are;
`ps_per_byte` emulates those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.completion import layer_chunk_table
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.diagnose import Blocked
from linkweave.collectives.runtime.gpu import program
from linkweave.collectives.runtime.gpu.counters import Counted, Counters
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.memory import LocalMemory, Memory, Shared
from linkweave.collectives.runtime.gpu.program import (
    CURSOR,
    GROUP,
    REPORT,
    LaunchConfig,
    Program,
    State,
    chunk_places,
)
from linkweave.collectives.runtime.gpu.standing import others, standing
from linkweave.collectives.runtime.gpu.uploads import Uploads

MOST_WIDTH = 16
"""Blocks a stream; with 8 ranks of 4 streams each, twice what an H100 holds."""


Occupancy = tuple[tuple[int, ...], int]
"""Ranks whose blocks one launch holds, and the blocks that their GPU holds at once."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one GPU has of a region: the programs of its ranks."""

    device: Device
    ranks: tuple[int, ...]
    peers: tuple[int, ...]  # of other launches, whose buffers they may write
    programs: tuple[tuple[int, Program], ...]
    groups: NDArray[np.void]  # [streams] of GROUP, all but `place` filled in
    report: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A collective of one size, ready to be launched any number of times."""

    plan: Plan
    config: LaunchConfig
    dtype: str
    op: str
    parts: tuple[_Part, ...]
    tables: tuple[int, ...]  # for each part the address of its groups, complete
    needs: Mapping[int, tuple[int, NDArray[np.void]]]  # of a queue: each rank's part and CHECKs
    direct: bool  # results are pushed into buffers
    uploads: Uploads  # its tables


class GpuRanks:
    """Runs plans for the ranks of this process. A context manager.

    `devices`: the GPU of each of them, by rank. `timeout` (s) bounds every wait. After a failure
    it must be closed; it closes `memory` as well. `max_blocks` caps the blocks of a launch.
    """

    def __init__(
        self, devices: Mapping[int, Device], memory: Memory, timeout: float = 30.0,
        max_blocks: int | None = None,
    ) -> None:  # fmt: skip
        self.devices, self.timeout, self.max_blocks = dict(devices), timeout, max_blocks
        self._memory = memory
        self.shares = {  # by the GPU's index: the GPU, and those of our ranks on it
            d.index: (d, tuple(r for r, other in devices.items() if other.index == d.index))
            for d in devices.values()
        }
        first, _ = next(iter(self.shares.values()))
        self._abort = first.pinned(1)  # which every GPU of the process sees
        self._uploads = Uploads()
        self._regions: dict[tuple[Plan, LaunchConfig], tuple[_Part, ...]] = {}
        self._launched: dict[int, Prepared] = {}  # the last one of each region
        self.counters = Counters([device for device, _ in self.shares.values()])

    def like(self, devices: Sequence[Device]) -> GpuRanks:
        """As many ranks of this process on these devices, with memory of their own."""
        ranks = dict(enumerate(devices))
        return GpuRanks(ranks, LocalMemory(devices, quiet=True), self.timeout, self.max_blocks)

    def share(self, nbytes: int) -> Shared:
        """Memory for a tensor of each rank; all ranks must call it together."""
        return self._memory.share(nbytes)

    def launches_all(self, size: int) -> bool:
        """Whether one launch runs all ranks of a plan for so many, and so sees all buffers."""
        return len(self.shares) == 1 and len(self.devices) == size

    def occupancy(self, dtype: str, op: str) -> list[Occupancy]:
        """Of each of our GPUs."""
        return [(ranks, d.resident(dtype, op)) for d, ranks in self.shares.values()]

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self.devices)

    def execute(self, plan: Plan, buffers: Sequence[Buffer], op: str = "sum") -> None:
        """As `Executor.execute`, on the default stream."""
        prepared = self.prepare(plan, buffers[0].nbytes, buffers[0].dtype, op)
        self.run(prepared, [b.address for b in buffers])
        self.check()

    def prepare(
        self, plan: Plan, nbytes: int, dtype: str, op: str, width: int | None = None,
        layers: Sequence[int] = (), seen: bool | None = None,
    ) -> Prepared:  # fmt: skip
        """Memory and tables for a verified plan. `width`, by default as many as our own GPUs have
        room for (`width_of`), must be the same on all ranks. `layers`: bytes of each, for a
        gradient queue. `seen`: ranks of all launches see each other's buffers (None: as those of
        one launch do); then results are pushed into these where that is no race."""
        width = width or width_of(plan, self.occupancy(dtype, op), self.max_blocks)
        plan, config = program.fit(plan, nbytes, width)
        key = (plan.with_chunks(plan.stride), config)
        if key not in self._regions:
            self._regions[key] = self._lay_out(plan, config)
        parts = self._regions[key]
        tables, mine = [], self._uploads.part()
        for part in parts:
            groups = part.groups.copy()
            places = {r: mine.add(part.device, chunk_places(plan, nbytes, r)) for r in part.ranks}
            for row, (rank, _) in zip(groups, part.programs, strict=True):
                row["place"] = places[rank]
            tables.append(mine.add(part.device, groups))
        needs = dict(self._needs(plan, config, nbytes, layers, parts, mine)) if layers else {}
        if seen is None:
            seen = self.launches_all(plan.size)
        direct = seen and not config.low_latency and program.may_push(plan)
        return Prepared(plan, config, dtype, op, parts, tuple(tables), needs, direct, mine)

    def _needs(
        self, plan: Plan, config: LaunchConfig, nbytes: int, layers: Sequence[int],
        parts: Sequence[_Part], uploads: Uploads,
    ) -> Iterator[tuple[int, tuple[int, NDArray[np.void]]]]:  # fmt: skip
        """For each of our ranks its part and the checks of its layers; `counters` of these are an
        offset into those of a call."""
        for place, part in enumerate(parts):
            part.device.load_check()
            counters = 0
            for rank in part.ranks:
                table = layer_chunk_table(plan, rank, nbytes, layers).astype(np.uint32)
                streams = table.shape[1]
                checks = np.zeros(len(layers), program.CHECK)
                checks["counters"], checks["abort"] = counters, self._abort.ctypes.data
                checks["need"] = uploads.add(part.device, table)
                checks["need"] += np.arange(len(layers), dtype=np.uint64) * (4 * streams)
                checks["timeout_ns"] = int(2e9 * self.timeout)
                checks["tracks"], checks["width"] = streams, config.width
                counters += 4 * streams * config.width
                yield rank, (place, checks)

    def run(
        self, prepared: Prepared, buffers: Sequence[int], stream: int | Mapping[int, int] = 0,
        ps_per_byte: int = 0, begun: Mapping[int, int] | None = None,
        inputs: Sequence[int] | None = None, everyone: Sequence[int] = (),
    ) -> Counted | None:  # fmt: skip
        """Enqueue one collective on one buffer (an address) for each of our ranks: in place, or of
        the values at `inputs`, which stay as they are.

        `stream`: one, or one for each GPU by its index. Returns at once; `check` tells whether it
        went well. Buffers are aligned to their elements. `begun`: for each of our ranks an event,
        behind which `dequeue` may follow, with the counters that are returned. `everyone`: the
        buffers of all ranks, as we see them, of a plan that was prepared so.
        """
        inputs = buffers if inputs is None else inputs
        if not len(buffers) == len(inputs) == len(self.devices):
            raise CollectiveError(f"{len(buffers)} buffers for {_some(tuple(self.devices))}")
        where = dict(zip(self.devices, zip(buffers, inputs, strict=True), strict=True))
        self._launched[id(prepared.parts)] = prepared
        streams = {i: stream if isinstance(stream, int) else stream[i] for i in self.shares}
        blocks = [len(part.programs) * prepared.config.width for part in prepared.parts]
        counted = None
        if begun:
            captured = any(d.capturing(streams[i]) for i, (d, _) in self.shares.items())
            counted = self.counters.take(blocks, len(begun), captured)
        finals = counted.addresses if counted else (0,) * len(blocks)
        each = zip(prepared.parts, prepared.tables, blocks, finals, strict=True)
        for part, table, count, address in each:
            if not count:
                continue
            on = streams[part.device.index]
            launch = program.launch(
                prepared.plan, prepared.config, table, int(self._abort.ctypes.data),
                [where[r] for r in part.ranks], self.timeout, prepared.op == "avg", ps_per_byte,
                address, [everyone[r] for r in part.peers] if prepared.direct else None,
            )  # fmt: skip
            if begun:
                part.device.zero(address, 4 * count, on)
                for rank in part.ranks:
                    part.device.record(begun[rank], on)
            part.device.launch(prepared.dtype, prepared.op, launch, count, on)
        return counted

    def dequeue(
        self, prepared: Prepared, counted: Counted, rank: int, layer: int, stream: int
    ) -> None:
        """What `stream` is given from now on comes behind that layer of the call with these
        counters, for whose `begun` it must wait already."""
        place, checks = prepared.needs[rank]
        check = checks[layer : layer + 1].copy()
        check["counters"] += np.uint64(counted.addresses[place])
        self.devices[rank].check(check, stream)

    # ---- not hanging -------------------------------------------------------------------------
    def check(self, stream: int = 0) -> None:
        """Wait for what was enqueued. Raises CollectiveTimeout naming who waited for whom, or
        CollectiveAborted."""
        for device, _ in self.shares.values():
            device.synchronise(stream)
        if self.aborted:
            raise self.failure()

    @property
    def aborted(self) -> bool:
        """Whether a deadline has passed on a GPU, or `abort` was called."""
        return bool(self._abort[0])

    def waiting(self) -> bool:
        """Whether a launch is under way that has waited for longer than some microseconds."""
        parts = [part for p in list(self._launched.values()) for part in p.parts]
        return any((part.report[::REPORT] == State.WAITS).any() for part in parts)

    def failure(self) -> CollectiveTimeout | CollectiveAborted:
        """What is to be raised once `aborted`, with who waits for whom."""
        found = self._standing()
        if State.TIMED_OUT not in {state for state, _ in found}:
            return CollectiveAborted("the launch was aborted" + others(found, None))
        waiting = {blocked.rank for _, blocked in found}
        # the end of the chain of those who wait: its peer waits for nobody
        late = [b for state, b in found if state is State.TIMED_OUT]
        first = next((b for _, b in found if b.peer not in waiting), late[0])
        words = f"{first} for {self.timeout:g} s" + others(found, first)
        return CollectiveTimeout(words, **first.fields())

    def _standing(self) -> list[tuple[State, Blocked]]:
        # a copy: calls of new kinds are added while the watch looks
        return [
            w for p in list(self._launched.values()) for part in p.parts
            for w in standing(p.plan, p.config.width, part.programs, part.report)
        ]  # fmt: skip

    def stands(self) -> str:
        """What each of our ranks that is under way waits for; empty where none is."""
        return others(self._standing(), None).removeprefix("; ")

    def abort(self) -> None:
        """Free the GPUs: every wait ends, now and later."""
        self._abort[0] = 1

    def close(self) -> None:
        """Give all memory back; nothing may be running. May be repeated."""
        self._regions.clear()
        self._launched.clear()
        with ExitStack() as last:  # all of it, whatever fails
            last.callback(self._memory.close)
            last.callback(self.counters.close)
            last.callback(self._uploads.close)

    def __enter__(self) -> GpuRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- memory ------------------------------------------------------------------------------
    def release(self, prepared: Prepared) -> None:
        """Give its tables back; nothing may be running that reads them."""
        self._uploads.drop(prepared.uploads)

    def _lay_out(self, plan: Plan, config: LaunchConfig) -> tuple[_Part, ...]:
        layout = program.lay_out(plan, config)
        ends = {(c.src, c.dst) for c in plan.connections if not c.local}
        bases = self._memory.bases(layout.nbytes, ends | {(b, a) for a, b in ends})
        parts, add = [], self._uploads.add
        for device, ranks in self.shares.values():
            found = tuple((r, p) for r in ranks for p in program.programs(plan, r))
            peers = tuple(program.receivers(plan, ranks))
            report = device.pinned(max(1, len(found) * config.width * REPORT))
            groups, order = np.zeros(len(found), GROUP), (*ranks, *peers)
            for i, (row, (rank, p)) in enumerate(zip(groups, found, strict=True)):
                row["code"] = add(device, p.code)
                row["ends"] = add(device, program.ends(plan, layout, p, bases, order))
                row["cursors"] = add(device, np.zeros((config.width, len(p.ends)), CURSOR))
                row["report"] = report.ctypes.data + 4 * i * config.width * REPORT
                row["rank"], row["num_ends"] = ranks.index(rank), len(p.ends)
                row["code_words"] = p.code.size
            parts.append(_Part(device, ranks, peers, found, groups, report))
        return tuple(parts)


def width_of(plan: Plan, rooms: Iterable[Occupancy], max_blocks: int | None = None) -> int:
    """Blocks a stream for which every GPU has room at once. Raises CollectiveError where there is
    no room for one. `max_blocks` caps the blocks of a launch."""
    found = MOST_WIDTH
    for ranks, room in rooms:
        streams = sum(s.rank in ranks for s in plan.tracks)
        most = room if max_blocks is None else min(room, max_blocks)
        if streams > most:
            raise CollectiveError(
                f"{plan.algorithm} needs {streams} thread blocks for {_some(ranks)} at once; the "
                f"GPU holds {room}"
                + ("" if max_blocks is None else f", max_blocks is {max_blocks}")
            )
        found = min(found, most // max(1, streams))
    return found


@cache
def open_device(index: int) -> Device:
    """The GPU of this number, as CUDA numbers them; opened once. Raises CollectiveError."""
    try:
        from linkweave.kernels.gpu.arrays import device_of

        found: Device = device_of(index)
    except ImportError as error:
        raise CollectiveError(
            f"GPU tensors need CuPy: install linkweave with its extra cuda12 or cuda13 ({error})"
        ) from None
    except (RuntimeError, OSError) as error:  # CuPy's errors
        raise CollectiveError(f"GPU {index} cannot be used: {error}") from None
    return found


def gpu_named(device: str) -> int | None:
    """N of "cuda:N", None of "cuda". Raises CollectiveError for anything else."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (":" in device and not number.isdigit()):
        raise CollectiveError(f"unknown device {device!r}; choose from cpu, cuda, cuda:N")
    return int(number) if number else None


def current_device() -> int:
    """The current GPU of this thread: torch's where it uses GPUs, else CuPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    try:
        from linkweave.kernels.gpu.device import current

        found: int = current()
    except ImportError as error:
        raise CollectiveError(f"GPU tensors need CuPy ({error})") from None
    return found


def use_device(index: int) -> None:
    """Make it the current GPU of this thread, for CuPy and, where it is loaded, torch."""
    open_device(index).use()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)


def virtual_ranks(
    device: Device, size: int, timeout: float = 30.0, max_blocks: int | None = None
) -> GpuRanks:
    """All `size` ranks on one GPU."""
    devices = [device] * size
    return GpuRanks(dict(enumerate(devices)), LocalMemory(devices), timeout, max_blocks)


def _some(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
