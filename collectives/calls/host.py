"""One rank's calls on CPU tensors. All ranks agree on each call before any data moves."""

from __future__ import annotations

import ctypes
import json
import logging
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives import errors
from linkweave.collectives.calls.plans import CallPlanner, HostPlans
from linkweave.collectives.calls.request import (
    ASSUMED,
    EXCHANGES,
    FIRST,
    KINDS,
    NOTHING,
    ORDER,
    WORDS,
    How,
    Request,
    algorithm_word,
    difference,
    notice,
    unsure,
)
from linkweave.collectives.calls.trace import CALLS, KERNELS, Trace, label
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.collective import COLLECTIVES, Root
from linkweave.collectives.planning.dataflow import chunk_counts
from linkweave.collectives.planning.layout import Sizes, block_table, chunk_bytes, reads, staging
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import size_class
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.control import PLANNING, Health, HostControl
from linkweave.collectives.runtime.cpu.executor import CpuExecutor, Ready, Region, memory_of
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.runtime.encoded import nothing
from linkweave.collectives.runtime.tensors import Block, as_buffer
from linkweave.collectives.settings import Settings
from linkweave.kernels.plan.interpreter import BLIND, HIDDEN
from linkweave.topology import Topology
from linkweave.topology.text import counted

log = logging.getLogger("linkweave")

_KNOWN, _REGIONS, _CHOSEN = 256, 64, 1024
"""How many kinds of calls (the most recently used), plans and choices (the newest) are kept."""
_MOST_TEXT = 200  # bytes of an error message that the other ranks are sent
PULL_BYTES = 64 << 10
"""Messages of at least so many bytes are read straight from the other ranks' memory, in collectives
that pull: one copy, and no wait for a slot."""
_ONE_BLOCK = np.zeros((1, 2), np.int64)


class Again(NamedTuple):
    """A call that may have been made before: arguments of `HostCalls.repeat`, and what the call
    returns."""

    arguments: tuple[Any, ...]
    result: Any


class Uneven(NamedTuple):
    """The sizes of an uneven call: rows of its input and of its result, and as in `Request` the
    bytes of the message, those of its blocks and their checksum."""

    given: int
    rows: int
    nbytes: int
    sizes: Sizes
    parts: int


class HostCalls:
    """The CPU calls of one communicator on one rank. One call runs at a time."""

    def __init__(
        self, arena: Arena, topology: Topology, settings: Settings,
        next_order: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        self.rank, self.size = arena.rank, arena.size
        self.planner = CallPlanner(topology, settings.order)
        self.request = self.planner.request
        self.health = Health(arena.rank)
        self.control = HostControl(arena, settings.longest, self.health)
        self.executor = CpuExecutor(self.control)
        self.trace = Trace(self.rank)
        self._next_order = next_order
        self._order, self._called_off = 0, False
        self._arena = arena
        self._settings = settings.checksum(topology)
        self._uneven = FifoCache[tuple[object, ...], Uneven]()  # by `operations.splits_key`
        self.assumes = False  # whether all ranks would have assumed the last sizes of an all-to-all
        self._known: OrderedDict[tuple[object, ...], Ready] = OrderedDict()
        self._chosen: OrderedDict[tuple[object, ...], tuple[int, int]] = OrderedDict()
        self._regions: OrderedDict[int, Region] = OrderedDict()
        self._idle = self.executor.load(nothing(self.size), arena.start)
        self._count = 0  # the number of the next plan, on rank 0
        self._mine: dict[Plan, int] = {}  # on rank 0: the number of each plan of one group
        self._plans = HostPlans(self.planner, self.trace)
        self._scratch: NDArray[np.uint8] | None = None
        self._scratch_at = 0
        self._guard = CallGuard(self.control)

    def next_order(self) -> int:
        """The number of a new call among those of all lanes; 0 without lanes. A call that has been
        called off keeps its own."""
        if self._called_off:
            self._called_off = False
            return self._order
        return self._next_order()

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        """The memory of `x`, and a function to call once the collective has written to it."""
        return as_buffer(x, written)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """An array in shared memory, which is freed with the last view of the array."""
        offset, memory = self._arena.allocate(nbytes)
        block = Block(memory)
        weakref.finalize(block, self._arena.free, offset, nbytes).atexit = False
        return np.asarray(block)

    def offset_of(self, memory: NDArray[np.uint8]) -> int:
        """The offset of a `block`, valid on all ranks."""
        return self._arena.mapping.offset_of(int(memory.ctypes.data), memory.nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """An array over any rank's block."""
        return self._arena.mapping.at(offset, nbytes)

    def scratch(self, request: Request, nbytes: int) -> Buffer:
        """Scratch memory of `nbytes` for a request, as a buffer like the request's.

        Calls run in order, so all share one piece.
        """
        like, address = request.buffer, self._scratch_of(nbytes)
        return Buffer(address, like.nbytes, like.dtype, like.itemsize, self._scratch)

    def _scratch_of(self, nbytes: int) -> int:
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = None  # frees it first
            self._scratch = self.block(nbytes)
            self._scratch_at = int(self._scratch.ctypes.data)
        return self._scratch_at

    def stage(self, request: Request, given: Buffer, result: Buffer | None) -> None:
        """Make a call from an input to a result; without one, this rank gets none."""
        self.make(replace(request, source=given, result=result))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def carry_out(
        self, order: int, again: Callable[[], Again | None] | None, body: Callable[..., Any],
        *args: Any,
    ) -> Any:  # fmt: skip
        """Make a call `again`, or else run `body(self, *args)`; `order` is what `next_order` gave
        when it was asked for."""
        if again is not None:
            with self.sharing_errors():
                found = again()
            if found is not None and self.repeat(*found.arguments, order=order):
                return found.result
        self._order = order
        return body(self, *args)

    def repeat(
        self, kind: str, address: int, nbytes: int, dtype: str, op: str, root: Root,
        how: How = "auto", result: int | None = None, parts: int = 0, sizes: Sizes | None = None,
        *, order: int | None = None,
    ) -> bool:  # fmt: skip
        """Repeat a call of a message of `nbytes` from the input at `address` to the `result`, which
        is 0 if this rank gets none; None: in place. Returns False if no call of this kind has been
        made before, or if the `sizes` of an all-to-all are not those of all ranks."""
        if type(root) not in (int, tuple) or not isinstance(op, str) or not isinstance(how, str):
            return False
        word = WORDS.get(how)
        key = (kind, nbytes, dtype, op, root, word, parts, sizes, None)
        ready = self._known.get(key)
        if ready is None or self.trace.wants_more:
            return False
        self._known.move_to_end(key)
        with self._guard, self.trace.call(ready.label):
            self._order = self.next_order() if order is None else order
            assumed = kind == "alltoall" and sizes is not None
            made = self._make(ready, address, result, assumed=assumed)
            self._called_off = not made and order is None
            return made

    def known_sizes(self, key: tuple[object, ...] | None) -> Uneven | None:
        """The sizes of the last call of this `operations.splits_key`."""
        return self._uneven.get(key) if key else None

    def remember_sizes(self, key: tuple[object, ...] | None, sizes: Uneven) -> None:
        if key:
            self._uneven.add(key, sizes)

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Tell the other ranks of an error inside, so that none waits for this rank's call."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise error

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank does not make the call that they make."""
        try:
            with self._guard:
                self._gather(Request("refused", NOTHING), str(error).encode()[:_MOST_TEXT])
        except CollectiveError as others:
            if self.health.broken:
                raise others from error

    def make(self, request: Request) -> None:
        with self._guard:
            key = request.kind_of_call
            if (ready := self._known.get(key)) is None:
                ready = self._prepared(request)
                self._known[key] = ready
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            with self.trace.call(ready.label):
                self._run(ready, request)

    def meet(
        self, kind: str, mine: NDArray[np.uint8], word: int = 0,
        result: NDArray[np.uint8] | None = None,
    ) -> None:  # fmt: skip
        """A "gather" of bytes on rank 0 as its `result`, or a "broadcast" of its bytes. Raises
        CollectiveError on all ranks unless they bring the same `word`."""
        address, gathers = int(mine.ctypes.data), kind == "gather"
        whole = mine.nbytes * (self.size if gathers else 1)
        target = int(result.ctypes.data) if result is not None else 0
        at = target if gathers else None
        if self.repeat(kind, address, whole, NOTHING.dtype, "sum", 0, "auto", at, word):
            return
        given = Buffer(address, mine.nbytes, NOTHING.dtype, 1, mine)
        request = self.request(kind, replace(given, nbytes=whole), "sum", parts=word)
        if gathers:
            got = None if result is None else replace(given, address=target, nbytes=whole)
            self.stage(request, given, got)
        else:
            self.make(request)

    def agree_on(self, request: Request) -> None:
        """Compare with all ranks a call that another object carries out."""
        with self._guard:
            self._gather(request, b"")

    def gather(self, what: str, payload: bytes) -> list[bytes]:
        """All ranks' payloads, by rank. `what` is one of `EXCHANGES`."""
        with self._guard:
            return self._gather(_exchange(what), payload)

    def share(self, make: Callable[[], bytes], planning: float = PLANNING) -> bytes:
        """Broadcast what `make` returns, or raises, on rank 0, which may take so many seconds as
        long as it shows signs of life."""
        with self._guard:
            return self._share(make, planning)

    def _share(self, make: Callable[[], bytes], planning: float = PLANNING) -> bytes:
        payload = b""
        if self.rank == 0:
            try:
                with self.control.alive():
                    payload = b"+" + make()
            except CollectiveError as error:
                payload = b"-" + json.dumps([type(error).__name__, str(error)]).encode()
        found = self._gather(_exchange("plan"), payload, planning)[0]
        if found[:1] == b"-":
            name, text = json.loads(found[1:])
            raise Refused(getattr(errors, name, CollectiveError), text)
        return found[1:]

    def _gather(
        self, request: Request, payload: bytes, planning: float = 0.0, first: bool = False
    ) -> list[bytes]:
        while True:
            settings = 0 if self.control.number else self._settings
            mine = notice(request, settings, self._order, first)
            rows, found = self.control.gather(mine, payload, planning)
            if (rows == mine).all():
                return found
            if request.kind != "exchange" or not unsure(rows.tolist()):
                self._differ(rows)
            self._call_off()

    def _differ(self, rows: NDArray[np.int64]) -> NoReturn:
        """Raise on every rank that their calls differ. No data has moved."""
        asked, page = rows.tolist(), self._arena.page(self.control.number)
        refusals = {
            r: self._arena.message(r, page).decode(errors="replace")
            for r, row in enumerate(asked) if KINDS[row[0]] == "refused"
        }  # fmt: skip
        self._call_off()
        raise Refused(CollectiveError, difference(asked, refusals))

    def _call_off(self) -> None:
        """End a call that differs between ranks, on all of them."""
        self.control.finish()
        for region in self._regions.values():  # some ranks may have sent to their slots
            self.executor.reset(region)
        self.control.agree(())
        self.control.done()

    def _prepared(self, request: Request) -> Ready:
        """A new kind of call with its plan. The ranks agree here on a new plan, not on the call."""
        kind, buffer = request.kind, request.buffer
        row = np.array([*notice(request), -1, -1], np.int64)
        where, staged = _ONE_BLOCK, staging("broadcast", self.size, self.rank, buffer.nbytes)
        message = kind, self.size, self.rank, buffer.nbytes, request.sizes
        if kind in COLLECTIVES:
            where, staged = block_table(*message), staging(*message, request.root)
        largest = int(where[:, 1].max())
        if largest == 0 or self.size == 1:
            needs = None if request.layers is None else np.zeros((len(request.layers), 0), np.int64)
            return self.executor.prepare(
                self._idle, row, where, len(where), buffer, request.op, kind, staged, needs
            )
        count = COLLECTIVES[kind].layout.parts(self.size)
        choice = self._choice(request, size_class(largest * count, count))
        number, chunks = self._chosen[choice]
        region = self._regions[number]
        needs = None
        if request.layers is not None:
            finals = region.encoded.finals(self.rank, chunks)
            needs = chunk_counts(finals, chunks, chunk_bytes(where, chunks), request.layers)
        name = label(kind, region.encoded.algorithm, buffer.nbytes)
        log.debug("rank %d: %s in %s", self.rank, name, counted(chunks, "chunk"))
        self.trace.say(KERNELS, f"{name}: interpreter and combiners by Numba")
        pulled = reads(*message, request.root) if self._pulls(request) else None
        return self.executor.prepare(
            region, row, where, chunks, buffer, request.op, name, staged, needs, choice, pulled
        )

    def _pulls(self, request: Request) -> bool:
        """Whether ranks read each other's inputs in such a call, if they can."""
        return (
            COLLECTIVES[request.kind].pulls(self.size) and request.algorithm == "auto"
            and self.planner.topology.on_memory and request.buffer.nbytes >= PULL_BYTES
        )  # fmt: skip

    def _choice(self, request: Request, nbytes: int) -> tuple[object, ...]:
        """The key in `_chosen` for a class of sizes. A new one is planned first.

        `_chosen` and `_regions` have the same entries in the same order on all ranks, because they
        change only here. A call in `_known` always has its choice in `_chosen`, so a rank that has
        evicted a call need not ask the others for its plan.
        """
        queued = request.layers is not None
        how = algorithm_word(request.algorithm)
        key = (request.kind, nbytes, request.root, how, queued)
        if key not in self._chosen:
            self._gather(request, b"", first=True)  # raises unless all ranks ask for the same
            with self.trace.phase("plan"):
                data = self._share(lambda: self._planned(request, nbytes))
            number, chunks, start, encoded = pickle.loads(data)
            if number not in self._regions:
                self._add(number, self.executor.load(encoded, start))
            self._chosen[key] = number, chunks
            if len(self._chosen) > _CHOSEN:
                gone, _ = self._chosen.popitem(last=False)
                self._forget(lambda ready: ready.choice == gone)
        return key

    def _planned(self, request: Request, nbytes: int) -> bytes:
        """On rank 0: (plan number, chunks, start of its region, a new plan), pickled."""
        template, encoded, chunks = self._plans.make(request, nbytes)
        if template in self._mine:
            return pickle.dumps((self._mine[template], chunks, 0, None))
        start, number = self._arena.reserve(memory_of(encoded)), self._count
        self._count += 1
        self._mine[template] = number
        return pickle.dumps((number, chunks, start, encoded))

    def _add(self, number: int, region: Region) -> None:
        """Keep a plan; if there are too many, evict the oldest."""
        self._regions[number] = region
        if len(self._regions) <= _REGIONS:
            return
        oldest, gone = self._regions.popitem(last=False)
        self._forget(lambda ready: ready.region is gone)
        self._chosen = OrderedDict((k, c) for k, c in self._chosen.items() if c[0] != oldest)
        if self.rank == 0:  # all ranks are here, so none uses the region
            self._mine = {plan: n for plan, n in self._mine.items() if n != oldest}
            self._arena.release(gone.start, memory_of(gone.encoded))

    def _forget(self, gone: Callable[[Ready], bool]) -> None:
        self._known = OrderedDict((k, r) for k, r in self._known.items() if not gone(r))

    def _run(self, ready: Ready, request: Request) -> None:
        buffer, given, result = request.buffer, request.source, None
        if given:
            result = request.result.address if request.result else 0
        if request.layer_counters and ready.needs is not None:
            request.layer_counters.begin(ready.needs)
        start = time.monotonic()
        with self.trace.phase("run"):
            self._make(
                ready, given.address if given else buffer.address, result, request.layer_counters
            )
        if self.trace.level >= CALLS:
            took = (time.monotonic() - start) * 1e6
            way = ", in shared memory" if ready.direct else ", by reads" if ready.pulled else ""
            self.trace.say(
                CALLS, f"call {self.control.number}: {ready.label} {buffer.dtype} {request.op}, "
                f"{took:.0f} us{way}"
            )  # fmt: skip
            self.trace.flags(lambda: ready.region.encoded, ready.num_chunks)

    def _placed(self, ready: Ready, given: int, result: int | None) -> tuple[int, int, int, int]:
        """The arguments of `CpuExecutor.run` for a call from the input at `given` to `result`.

        `result` is None in place, and 0 if this rank gets none. The message is the result, if that
        is all of it; the input, if this rank writes nothing, or nothing but a result that lies
        apart; or else a copy of the input in scratch memory.
        """
        staged = ready.staged
        if result is None or (result == 0 and not ready.writes):
            return given - staged.put if result == 0 else given, 0, 0, 0
        if result and staged.result == staged.nbytes:
            return result, given, 0, 0
        shift = result - given - staged.get
        apart = result >= given + staged.given or given >= result + staged.result
        if result and ready.clean and (apart or shift == 0):
            return (given, 0, shift, 0) if staged.given else (result - staged.get, 0, 0, 0)
        return self._scratch_of(staged.nbytes), given, 0, result

    def _make(
        self, ready: Ready, given: int, result: int | None, counters: LayerCounters | None = None,
        assumed: bool = False,
    ) -> bool:  # fmt: skip
        """Make a call from the input at `given` to `result`, which is None in place, and 0 if this
        rank gets none. Returns False if sizes were `assumed` that were not those of all ranks."""
        target = given if result is None else result
        if self.size == 1:
            self.control.number += 1
            if target != given:
                ctypes.memmove(target, given, ready.staged.given)
            return True
        placed = self._placed(ready, given, result)
        notice = ready.notice
        notice[ORDER], notice[FIRST] = self._order, ASSUMED * assumed
        notice[-2], notice[-1] = self._told(ready, given, target) if ready.pulls else (
            -1, self._arena.mapping.offset_of(placed[0], ready.span) if ready.span else -1
        )  # fmt: skip
        if self.executor.run(ready, *placed, given, target, counters):
            return True
        rows = self.control.notices[self.control.number % 2][:, : len(notice) - 2].copy()
        if not assumed or not unsure(rows.tolist()):
            self._differ(rows)
        self._call_off()
        return False

    def _told(self, ready: Ready, given: int, result: int) -> tuple[int, int]:
        """Where other ranks may read the input: (its address, its offset in shared memory or -1).
        The address is `HIDDEN` if this rank may overwrite it, `BLIND` if it cannot read theirs."""
        staged = ready.staged
        apart = result >= given + staged.given or given >= result + staged.result
        in_place = result - staged.get == given - staged.put
        if not (apart or in_place):
            return HIDDEN, -1
        offset = self._arena.mapping.offset_of(given, staged.given)
        if not staged.given:  # nobody reads it
            offset = 0
        return given if self.executor.readable() else BLIND, offset

    def close(self) -> None:
        """Leave the communicator. Ranks that wait for this one are told at once."""
        self.health.close()
        self._scratch = None
        self._known.clear()
        self.control.close()
        self._arena.close()


def _exchange(what: str) -> Request:
    return Request("exchange", NOTHING, root=EXCHANGES.index(what))


class CallGuard:
    """Lets one call run at a time. An error inside aborts all ranks, unless it is `Refused`."""

    def __init__(self, control: HostControl) -> None:
        self._control, self._health, self._lock = control, control.health, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._health.usable:
            self._lock.release()
            self._health.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if error is None:
                return
            if self._health.closed and isinstance(error, Exception):  # by another thread
                self._health.check()
            if isinstance(error, Refused):
                raise error.kind(error.text) from None
            # the others must not wait for this rank
            if not self._health.closed and not self._control.aborted():
                self._control.give_up(RAISED)
            self._health.fail(error)
        finally:
            self._lock.release()


class Refused(Exception):
    """All ranks refuse a call before any data has moved; the communicator stays usable."""

    def __init__(self, kind: type[CollectiveError], text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


_K = TypeVar("_K")
_V = TypeVar("_V")
MOST = 512


class FifoCache(dict[_K, _V]):
    """A dictionary of at most `MOST` entries.

    Ranks that add the same keys evict the same keys. Lookups do not change the order: a call that
    only some ranks make, and that is then refused, must not change what is evicted.
    """

    def add(self, key: _K, value: _V) -> list[_V]:
        """Add an entry. A full cache first drops its older half, which is returned."""
        full = len(self) >= MOST
        gone = [self.pop(old) for old in list(self)[: MOST // 2]] if full else []
        self[key] = value
        return gone
