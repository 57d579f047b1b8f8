"""Run plans on the GPUs of this process: one kernel launch per GPU serves all ranks on it.

If all ranks of a plan share one GPU ("virtual ranks"), their connections go through that GPU's own
memory. Such a run checks the kernel and its memory bandwidth but says nothing about links, which
`ps_per_byte` emulates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.dataflow import layer_chunk_table
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.diagnose import Blocked, waits
from linkweave.collectives.runtime.gpu import launch_tables
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.launch_tables import (
    CURSOR,
    REPORT,
    SETTINGS,
    TRACK,
    LaunchConfig,
    Setting,
    State,
    TrackCode,
    chunk_extents,
    programs,
)
from linkweave.collectives.runtime.gpu.memory import Bases, LocalMemory, Memory, SymmetricMemory

Region = tuple[Plan, LaunchConfig, bool]
"""What shares counters and slots: the launches of a plan with a config, in graphs or not."""

Occupancy = tuple[tuple[int, ...], int]
"""(ranks that share a launch, thread blocks that can be resident on their GPU at once)."""


MOST_BLOCKS, SHARE = 80, 5
"""Thread blocks of each rank in a launch, if `max_blocks` tells no other number: so many, or this
part of those that the GPU holds, which are three a multiprocessor. That leaves two multiprocessors
in five without any, for a model's kernels, for NCCL's and for other communicators. Four ranks on
one H100, over links of 25 GB/s, took the same time with 28 blocks in all as with 224, and with 14
moved 41 GB/s into and out of each rank, 12 GB/s a block: so 39 would fill 18 links of 25 GB/s, if
they answer as fast as memory. Beside products of matrices, 224 blocks on its 132 multiprocessors
left hidden 33 % of the shorter time, 112 left 54 % and 56 left 64 %."""

Arguments = tuple[Device, NDArray[np.void], int]
"""(GPU, argument of its launch, thread blocks)."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The share of one GPU in a plan's layout."""

    device: Device
    ranks: tuple[int, ...]
    peers: tuple[int, ...]  # ranks of other launches whose buffers these ranks may write
    programs: tuple[tuple[int, TrackCode], ...]  # (rank, program) of each track
    tracks: NDArray[np.void]  # [tracks] of TRACK, complete except for `chunks`
    report: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A collective of one message size that can be launched any number of times."""

    plan: Plan
    config: LaunchConfig
    dtype: str
    op: str
    parts: tuple[_Part, ...]
    tables: tuple[int, ...]  # the device address of each part's complete tracks
    checks: Mapping[int, tuple[int, NDArray[np.void]]]  # rank -> (index of its part, CHECKs)
    direct: bool  # whether results are pushed into the receivers' buffers
    uploads: Uploads  # the tables' memory


class GpuRanks:
    """Runs plans for the ranks of this process. A context manager.

    `devices` maps each rank to its GPU. `timeout` bounds every wait in the kernel, in seconds.
    `max_blocks` caps the thread blocks of a launch. All ranks of a plan need the same `settings`.
    `close` also closes `memory`; after a failure nothing else may be called.
    """

    def __init__(
        self, devices: Mapping[int, Device], memory: Memory, timeout: float = 30.0,
        max_blocks: int | None = None, settings: Sequence[Setting] = SETTINGS,
    ) -> None:  # fmt: skip
        self.devices, self.timeout, self.max_blocks = dict(devices), timeout, max_blocks
        self.settings = settings
        self.sharing = 1  # processes on each GPU
        self._memory = memory
        self.shares = {  # GPU index -> (the GPU, our ranks on it)
            d.index: (d, tuple(r for r, other in devices.items() if other.index == d.index))
            for d in devices.values()
        }
        first, _ = next(iter(self.shares.values()))
        self._abort = first.pinned(1)  # pinned memory is visible to every GPU of the process
        self._uploads = Uploads()
        self._stops = {  # GPU index -> the same word in its own memory
            i: self._uploads.add(d, np.zeros(1, np.uint32)) for i, (d, _) in self.shares.items()
        }
        self._regions: dict[Region, tuple[_Part, ...]] = {}
        self._bases: dict[Region, Bases] = {}
        self._launched: dict[int, Prepared] = {}  # the latest launch of each region
        self.counters = CounterPool([device for device, _ in self.shares.values()])

    def like(self, devices: Sequence[Device]) -> GpuRanks:
        """New ranks on these devices, with the same limits and with memory of their own."""
        ranks = dict(enumerate(devices))
        assert isinstance(self._memory, LocalMemory)  # of ranks that are threads
        memory = self._memory.like(devices)
        return GpuRanks(ranks, memory, self.timeout, self.max_blocks, self.settings)

    def allocate_symmetric(self, nbytes: int) -> SymmetricMemory:
        """Allocate memory for a tensor on every rank. Collective: all ranks must call it."""
        return self._memory.allocate_symmetric(nbytes)

    def launches_all(self, size: int) -> bool:
        """Whether one launch runs all `size` ranks of a plan, and so sees all their buffers."""
        return len(self.shares) == 1 and len(self.devices) == size

    def occupancy(self, dtype: str, op: str) -> list[Occupancy]:
        """The occupancy of each GPU of this process, of which other processes get as much."""
        return [(ranks, d.resident(dtype, op) // self.sharing) for d, ranks in self.shares.values()]

    def prepare(
        self, plan: Plan, nbytes: int, dtype: str, op: str, width: int | None = None,
        layers: Sequence[int] = (), seen: bool | None = None, captured: bool = False,
    ) -> Prepared:  # fmt: skip
        """Allocate the memory and upload the tables for launches of a verified plan.

        `width` is the number of thread blocks per track and must be the same on all ranks; the
        default is the most that fits our GPUs (`width_of`). `layers` gives the bytes of each layer
        of a gradient queue. `seen` says that every rank sees all ranks' buffers (None: only ranks
        of one launch do); then results are pushed into these buffers unless that would race.
        Launches that are `captured` into graphs have counters and slots of their own. Raises
        OutOfMemory.
        """
        width = width or width_of(plan, self.occupancy(dtype, op), self.max_blocks)
        plan, config = launch_tables.fit(plan, nbytes, width, self.settings)
        key = (plan.with_chunks(plan.stride), config, captured)
        tables, mine = [], self._uploads.part()
        try:
            if key not in self._regions:
                self._regions[key] = self._lay_out(plan, config, key)
            parts = self._regions[key]
            for part in parts:
                tracks = part.tracks.copy()
                chunks = {
                    r: mine.add(part.device, chunk_extents(plan, nbytes, r)) for r in part.ranks
                }
                tracks["chunks"] = [chunks[rank] for rank, _ in part.programs]
                tables.append(mine.add(part.device, tracks))
            checks = dict(self._checks(plan, config, nbytes, layers, parts, mine)) if layers else {}
        except BaseException:
            self._uploads.drop(mine)
            raise
        if seen is None:
            seen = self.launches_all(plan.size)
        direct = seen and not config.low_latency and launch_tables.may_push(plan)
        return Prepared(plan, config, dtype, op, parts, tuple(tables), checks, direct, mine)

    def _checks(
        self, plan: Plan, config: LaunchConfig, nbytes: int, layers: Sequence[int],
        parts: Sequence[_Part], uploads: Uploads,
    ) -> Iterator[tuple[int, tuple[int, NDArray[np.void]]]]:  # fmt: skip
        """Yield (rank, (index of its part, [layers] of CHECK)); `counters` of a CHECK is an offset
        into the call's counters."""
        for index, part in enumerate(parts):
            part.device.load_check()
            counters = 0
            for rank in part.ranks:
                table = layer_chunk_table(plan, rank, nbytes, layers).astype(np.uint32)
                tracks = table.shape[1]
                checks = np.zeros(len(layers), launch_tables.CHECK)
                checks["counters"], checks["abort"] = counters, self._abort.ctypes.data
                checks["stop"] = self._stops[part.device.index]
                checks["need"] = uploads.add(part.device, table)
                checks["need"] += np.arange(len(layers), dtype=np.uint64) * (4 * tracks)
                checks["timeout_ns"] = int(2e9 * self.timeout)
                checks["tracks"], checks["width"] = tracks, config.width
                counters += 4 * tracks * config.width
                yield rank, (index, checks)

    def run(
        self, prepared: Prepared, buffers: Sequence[int], stream: int | Mapping[int, int] = 0,
        ps_per_byte: int = 0, begun: Mapping[int, int] | None = None,
        inputs: Sequence[int] | None = None, everyone: Sequence[int] = (),
    ) -> CallCounters | None:  # fmt: skip
        """Enqueue one collective and return at once; `check` reports failures.

        `buffers` holds the address of each of our ranks' buffers, aligned to its elements. The
        values are read from `inputs`, which do not change, or in place. `stream` is a CUDA stream,
        or maps GPU indices to streams. `begun` maps each of our ranks to an event that is recorded
        before the launch; `dequeue`, with the counters that are returned, must wait for it.
        `everyone` holds the addresses of all ranks' buffers if the plan was prepared with `seen`.
        """
        streams = {i: stream if isinstance(stream, int) else stream[i] for i in self.shares}
        blocks = [len(part.programs) * prepared.config.width for part in prepared.parts]
        counted = None
        if begun:
            counted = self.counters.take(blocks, len(begun))
            for part, count, address in zip(prepared.parts, blocks, counted.addresses, strict=True):
                on = streams[part.device.index]
                if count:
                    part.device.zero(address, 4 * count, on)
                for rank in part.ranks if count else ():
                    part.device.record(begun[rank], on)
        finals = counted.addresses if counted else ()
        made = self.arguments(prepared, buffers, inputs, everyone, ps_per_byte, finals)
        self.enqueue(prepared, made, streams)
        return counted

    def arguments(
        self, prepared: Prepared, buffers: Sequence[int], inputs: Sequence[int] | None = None,
        everyone: Sequence[int] = (), ps_per_byte: int = 0, finals: Sequence[int] = (),
    ) -> list[Arguments]:  # fmt: skip
        """What `enqueue` launches on each GPU, for the arguments of `run`. `finals` holds the
        addresses of a queue's counters, of each GPU."""
        inputs = buffers if inputs is None else inputs
        if not len(buffers) == len(inputs) == len(self.devices):
            raise CollectiveError(f"{len(buffers)} buffers for {_some(tuple(self.devices))}")
        data = dict(zip(self.devices, zip(buffers, inputs, strict=True), strict=True))
        found = []
        for i, (part, table) in enumerate(zip(prepared.parts, prepared.tables, strict=True)):
            if not part.programs:
                continue
            launch = launch_tables.launch(
                prepared.plan, prepared.config, table, self._stops[part.device.index],
                int(self._abort.ctypes.data), [data[r] for r in part.ranks], self.timeout,
                prepared.op == "avg", ps_per_byte, finals[i] if finals else 0,
                [everyone[r] for r in part.peers] if prepared.direct else None,
            )  # fmt: skip
            found.append((part.device, launch, len(part.programs) * prepared.config.width))
        return found

    def enqueue(
        self, prepared: Prepared, arguments: Sequence[Arguments], streams: Mapping[int, int]
    ) -> None:
        """Launch on each GPU's stream; may be repeated with the same arguments."""
        self._launched[id(prepared.parts)] = prepared
        for device, launch, blocks in arguments:
            device.launch(prepared.dtype, prepared.op, launch, blocks, streams[device.index])

    def dequeue(
        self, prepared: Prepared, counted: CallCounters, rank: int, layer: int, stream: int
    ) -> None:
        """Make later work on `stream` wait until a layer of a call is final.

        `counted` holds the call's counters, for whose `begun` event the stream already waits.
        """
        index, checks = prepared.checks[rank]
        check = checks[layer : layer + 1].copy()
        check["counters"] += np.uint64(counted.addresses[index])
        self.devices[rank].check(check, stream)

    # ---- failures ----------------------------------------------------------------------------
    def check(self, stream: int = 0) -> None:
        """Wait for the work enqueued on `stream`.

        Raises CollectiveTimeout, which names the rank that waited and its peer, or
        CollectiveAborted.
        """
        for device, _ in self.shares.values():
            device.synchronise(stream)
        if self.aborted:
            self.abort()  # on the other GPUs as well
            raise self.failure()

    @property
    def aborted(self) -> bool:
        """Whether a wait on a GPU has timed out or `abort` was called."""
        return bool(self._abort[0])

    def waiting(self) -> bool:
        """Whether a thread block has been waiting for longer than some milliseconds."""
        parts = [part for p in list(self._launched.values()) for part in p.parts]
        return any((part.report[::REPORT] == State.WAITS).any() for part in parts)

    def failure(self) -> CollectiveTimeout | CollectiveAborted:
        """The error to raise once `aborted`; its message says which rank waits for which."""
        found = self._blocked()
        late = [b for state, b in found if state is State.TIMED_OUT]
        if not late:
            return CollectiveAborted("the launch was aborted" + describe(found))
        waiting = {blocked.rank for _, blocked in found}
        # name the end of a chain of waiting ranks: the one whose peer does not wait itself
        first = next((b for _, b in found if b.peer not in waiting), late[0])
        words = f"{first} for {self.timeout:g} s" + describe(found, first.rank)
        return CollectiveTimeout(words, **first.fields())

    def _blocked(self) -> list[tuple[State, Blocked]]:
        # copy the launches: other threads add some while the watchdog reads
        return [
            b for p in list(self._launched.values()) for part in p.parts
            for b in blocked_tracks(p.plan, p.config.width, part.programs, part.report)
        ]  # fmt: skip

    def describe_waits(self) -> str:
        """What each of our ranks waits for; empty if none does."""
        return describe(self._blocked()).removeprefix("; ")

    def abort(self) -> None:
        """End every wait on the GPUs, now and later."""
        self._abort[0] = 1
        for index, (device, _) in self.shares.items():
            with suppress(RuntimeError):  # then its blocks see the host's word
                device.store(self._stops[index], self._abort)

    def close(self) -> None:
        """Free all memory; no launch may be running. Can be called again."""
        self._regions.clear()
        self._bases.clear()
        self._launched.clear()
        with ExitStack() as last:  # runs every callback even if one raises
            last.callback(self._memory.close)
            last.callback(self.counters.close)
            last.callback(self._uploads.close)

    def __enter__(self) -> GpuRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- memory ------------------------------------------------------------------------------
    def release(self, prepared: Prepared) -> None:
        """Free the tables; no launch may be running that reads them."""
        self._uploads.drop(prepared.uploads)

    def _lay_out(self, plan: Plan, config: LaunchConfig, key: Region) -> tuple[_Part, ...]:
        layout = launch_tables.lay_out(plan, config)
        if key not in self._bases:  # on all ranks alike, whatever fails on one of them later
            ends = {(c.src, c.dst) for c in plan.connections if not c.local}
            self._bases[key] = self._memory.bases(layout.nbytes, ends | {(b, a) for a, b in ends})
        bases = self._bases[key]
        parts, add = [], self._uploads.add
        for device, ranks in self.shares.values():
            found = tuple((r, p) for r in ranks for p in programs(plan, r))
            peers = tuple(launch_tables.receivers(plan, ranks))
            report = device.pinned(max(1, len(found) * config.width * REPORT))
            tracks, order = np.zeros(len(found), TRACK), (*ranks, *peers)
            for i, (row, (rank, p)) in enumerate(zip(tracks, found, strict=True)):
                row["code"] = add(device, p.code)
                row["ends"] = add(device, launch_tables.ends(plan, layout, p, bases.of, order))
                row["cursors"] = add(device, np.zeros((config.width, len(p.ends)), CURSOR))
                row["report"] = report.ctypes.data + 4 * i * config.width * REPORT
                row["rank"], row["num_ends"] = ranks.index(rank), len(p.ends)
                row["code_words"] = p.code.size
            parts.append(_Part(device, ranks, peers, found, tracks, report))
        return tuple(parts)


def width_of(plan: Plan, occupancies: Iterable[Occupancy], max_blocks: int | None = None) -> int:
    """The most thread blocks per track that can be resident on every GPU.

    `max_blocks` caps the thread blocks of a launch; by default, `MOST_BLOCKS` or a part of the GPU
    for each rank do, but for plans of more tracks. Raises CollectiveError if not even one block per
    track fits.
    """
    found = []
    for ranks, resident in occupancies:
        tracks = sum(s.rank in ranks for s in plan.tracks)
        usual = max(tracks, min(MOST_BLOCKS, resident // SHARE) * len(ranks))
        most = min(resident, usual if max_blocks is None else max_blocks)
        if tracks > most:
            raise CollectiveError(
                f"{plan.algorithm} needs {tracks} thread blocks for {_some(ranks)} at once; the "
                f"GPU holds {resident}"
                + ("" if max_blocks is None else f", max_blocks is {max_blocks}")
            )
        found.append(most // max(1, tracks))
    return min(found)


def virtual_ranks(
    device: Device, size: int, timeout: float = 30.0, max_blocks: int | None = None,
    settings: Sequence[Setting] = SETTINGS,
) -> GpuRanks:  # fmt: skip
    """`GpuRanks` with all `size` ranks on one GPU."""
    devices = [device] * size
    return GpuRanks(dict(enumerate(devices)), LocalMemory(devices), timeout, max_blocks, settings)


def _some(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def blocked_tracks(
    plan: Plan, width: int, programs: Sequence[tuple[int, TrackCode]], report: NDArray[np.uint32]
) -> Iterator[tuple[State, Blocked]]:
    """Each thread block of one GPU that gave up or has been waiting for long, and its step."""
    rows = report[: len(programs) * width * REPORT].reshape(-1, width, REPORT)
    for (rank, p), row in zip(programs, rows, strict=True):
        for state, _, group, pc in row.tolist():
            if state in (State.WAITS, State.TIMED_OUT, State.ABORTED):
                w = p.waits[pc]
                chunk = group * plan.stride + w.chunk
                yield (
                    State(state),
                    waits(plan, w.connection, w.sender, rank, p.track.channel, w.step, chunk),
                )


def describe(found: Sequence[tuple[State, Blocked]], skip: int | None = None) -> str:
    """`; ` and what it waits for, for each rank but `skip`."""
    first = {blocked.rank: blocked for _, blocked in reversed(found)}  # of a rank, its first track
    ranks = dict.fromkeys(blocked.rank for _, blocked in found)
    return "".join(f"; {first[rank]}" for rank in ranks if rank != skip)


class Uploads:
    """Uploaded arrays. `close` frees all of them; a `part` can be dropped earlier."""

    def __init__(self) -> None:
        self._made: list[tuple[Device, int]] = []
        self._parts: dict[int, Uploads] = {}

    def add(self, device: Device, array: NDArray[np.generic]) -> int:
        """Upload an array; returns its device address."""
        self._made.append((device, device.upload(array)))
        return self._made[-1][1]

    def part(self) -> Uploads:
        made = Uploads()
        self._parts[id(made)] = made
        return made

    def drop(self, part: Uploads) -> None:
        """Free a part; no kernel may be running that reads it."""
        self._parts.pop(id(part), None)
        part.close()

    def close(self) -> None:
        with ExitStack() as last:  # runs every callback even if one raises
            while self._made:
                device, address = self._made.pop()
                last.callback(device.free, address)
            while self._parts:
                last.callback(self._parts.popitem()[1].close)


@dataclass
class CallCounters:
    """One call's counters.

    `addresses` has one device address for each GPU of the process, of one uint32 per thread block.
    `users` is the number of ranks of the process that may still read them.
    """

    addresses: tuple[int, ...]
    key: tuple[int, ...]
    users: int


class CounterPool:
    """Allocates counters, reuses those that are given back, and frees all of them in `close`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._spare: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._made: list[tuple[Device, int]] = []
        self._lock = threading.Lock()
        self.lent = 0
        """How many calls' counters are in use or held by CUDA graphs."""

    def take(self, blocks: Sequence[int], users: int) -> CallCounters:
        """Counters for a call with this many thread blocks on each GPU; a CUDA graph keeps its
        own."""
        key = tuple(blocks)
        with self._lock:
            if spare := self._spare.get(key):
                self.lent += 1
                return CallCounters(spare.pop(), key, users)
            made = []
            for device, count in zip(self._devices, key, strict=True):
                made.append(device.allocate(4 * max(1, count)))
                self._made.append((device, made[-1]))
            self.lent += 1
            return CallCounters(tuple(made), key, users)

    def give_back(self, counted: CallCounters) -> None:
        """Called by each user once nothing that it enqueued reads the counters any more."""
        with self._lock:
            counted.users -= 1
            if not counted.users:
                self.lent -= 1
                self._spare.setdefault(counted.key, []).append(counted.addresses)

    def close(self) -> None:
        while self._made:
            device, address = self._made.pop()
            device.free(address)
