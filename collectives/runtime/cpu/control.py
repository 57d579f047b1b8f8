"""How the ranks of a machine coordinate over shared memory: they agree on calls, exchange messages,
and give up."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.header import (
    BEATS,
    BELL,
    CLAIMED,
    CLOSED,
    FINISHED,
    MAX_MESSAGE,
    POSTED,
    WAITS,
)
from linkweave.collectives.runtime.diagnose import (
    DIED,
    DIFFERED,
    INTERRUPTED,
    LEFT,
    REASONS,
    TIMED_OUT,
)
from linkweave.kernels.plan import counters as kernel

log = logging.getLogger("linkweave")

_CLAIM = 1.0  # seconds in which a rank that gives up says why
PATIENT = 30.0
"""Seconds after which a wait is told of, well before a longer deadline."""

Where = Callable[[], tuple[str, dict[str, int]]]
"""Returns what a rank waits for, as words and as the fields of `CollectiveTimeout`."""

PLANNING = 300.0
"""Seconds that rank 0 may plan, as long as it shows signs of life; the others notice at once if it
dies, and after their timeout if it is stopped."""


class Health:
    """Whether a communicator can be used. A process forked from a rank cannot use it."""

    def __init__(self, rank: int) -> None:
        self.rank, self._pid = rank, os.getpid()
        self.closed = False
        self.broken: str | None = None  # what went wrong
        self.usable = True
        self.family: list[Callable[[BaseException], None]] = []  # tell the other lanes of a failure
        _alive.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this process was forked from the rank's process."""
        return os.getpid() != self._pid

    def fail(self, error: BaseException) -> None:
        """Refuse all further calls, on the other lanes of the communicator as well."""
        if self.broken is None:
            self.broken, self.usable = f"{type(error).__name__}: {error}", False
            for other in self.family:
                other(error)

    def close(self) -> None:
        self.closed, self.usable = True, False
        self.family.clear()

    def check(self) -> None:
        """Raise CollectiveError unless calls can be made."""
        if self.usable:
            return
        if self.foreign:
            raise CollectiveError(
                f"process {os.getpid()} was forked from rank {self.rank} (process {self._pid}) and "
                "is not a rank itself: it cannot take part in the ranks' calls; start ranks of its "
                "own with linkweave.spawn() or linkweave.init()"
            )
        if self.closed:
            raise CollectiveError("this communicator is closed")
        raise CollectiveError(f"this communicator failed before ({self.broken}); make a new one")


_alive: weakref.WeakSet[Health] = weakref.WeakSet()


def _after_fork() -> None:
    for health in list(_alive):
        health.usable = False


os.register_at_fork(after_in_child=_after_fork)


class _Heart:
    """A thread that counts up a word while `beats` is set, and makes a call each time."""

    def __init__(self, word: NDArray[np.int64], pause: float) -> None:
        self.beats, self._over = False, threading.Event()
        self.call: Callable[[], None] = lambda: None
        self._thread = threading.Thread(
            target=self._run, args=(word, pause), name="linkweave-alive", daemon=True
        )
        self._thread.start()

    def _run(self, word: NDArray[np.int64], pause: float) -> None:
        while not self._over.wait(pause):
            word[0] += self.beats
            self.call()

    def stop(self) -> None:
        """Afterwards the word is not used any more."""
        self._over.set()
        if self._thread is not threading.current_thread():  # where garbage is collected
            self._thread.join()


class HostControl:
    """One rank's side. Every rank makes the same calls in the same order, numbered from 1.

    A call is a `gather`, or an `agree` that is followed by `done` or `finish`. Every wait raises
    CollectiveTimeout after `timeout` seconds, or CollectiveAborted once a rank dies, leaves or
    gives up.
    """

    def __init__(self, arena: Arena, timeout: float, health: Health) -> None:
        self.arena, self.timeout, self.health = arena, timeout, health
        self.rank, self.size = arena.rank, arena.size
        self.number = 0
        self.yields = kernel.YIELDS  # rounds of a wait before it sleeps
        self.allowance = 0.0  # seconds for which rank 0 may be `alive` before it comes to any call
        control = [arena.base + arena.control(r) for r in range(self.size)]
        self.peers = [r for r in range(self.size) if r != self.rank]
        self.bell = control[self.rank] + BELL
        self.bells = np.array([control[r] + BELL for r in self.peers], np.int64)
        self.posted = control[self.rank] + POSTED
        self.finished = control[self.rank] + FINISHED
        self.others = np.array(
            [[control[r] + at for r in self.peers] for at in (POSTED, FINISHED)], np.int64
        ).reshape(2, len(self.peers))
        self.notices = [arena.notices(0), arena.notices(1)]
        self._values = np.zeros(len(self.peers), np.int64)  # awaited by `_await`
        self._waits = arena.words(arena.control(self.rank) + WAITS, 1)
        self._heard = 0, 0.0  # rank 0's signs of life, and when the last one was new
        self._told_of = 0.0  # when the long wait began that has been told of
        self._heart: _Heart | None = None
        self._sent: list[tuple[int, int]] = []  # heap blocks that other ranks may still read

    def leave_cores(self) -> None:
        self.yields = kernel.BESIDE

    def name(self, rank: int) -> str:
        """`rank R`; in a part of a communicator also R's number in the whole."""
        whole = self.arena.members[rank]
        return f"rank {rank}" + (f" ({whole} of all)" if whole != rank else "")

    # ---- calls -------------------------------------------------------------------------------
    def agree(self, words: Sequence[int], planning: float = 0.0) -> NDArray[np.int64]:
        """Begin a call and wait for all ranks to begin it; returns [size, len(words)], every
        rank's words. Rank 0 may be `alive` for `planning` seconds before it comes."""
        self.number += 1
        rows = self.notices[self.number % 2]
        rows[self.rank, : len(words)] = words
        rows[self.rank, len(words) :] = -1  # where no buffer lies
        kernel.raise_counter(self.posted, self.number, self.bells)
        self._await(0, "make its call", planning)
        return rows[:, : len(words)]

    def done(self) -> None:
        """End the call without waiting for the other ranks."""
        kernel.raise_counter(self.finished, self.number, self.bells[:0])

    def finish(self) -> None:
        """End the call and wait until every rank has ended it."""
        kernel.raise_counter(self.finished, self.number, self.bells)
        self._await(1, "finish its call")

    def gather(
        self, words: Sequence[int], message: bytes, planning: float = 0.0
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """A whole call: like `agree`; also gathers every rank's `message`."""
        page = self.arena.page(self.number + 1)
        while len(self._sent) > 1:  # all ranks have made a later call than the oldest
            self.arena.free(*self._sent.pop(0))
        if len(message) <= MAX_MESSAGE:
            self.arena.leave_message(message, page)
        else:
            offset, memory = self.arena.allocate(len(message))
            memory[:] = np.frombuffer(message, np.uint8)
            self._sent.append((offset, len(message)))
            self.arena.write_header(page, len(message), offset)
        rows = self.agree(words, planning).copy()
        found = [self.arena.message(rank, page) for rank in range(self.size)]
        self.done()
        return rows, found

    # ---- failures ----------------------------------------------------------------------------
    def _await(self, which: int, what: str, planning: float = 0.0) -> None:
        start, counters = time.monotonic(), self.others[which]
        self._values.fill(self.number)
        yields = self.yields
        while True:
            status = self.interruptible(
                kernel.await_counters, counters, self._values, self.bell,
                self.arena.abort_address, yields,
            )  # fmt: skip
            yields = 0  # after sleeping once, sleep again at once
            if status == kernel.DONE:
                self._waits[0] = 0
                return
            self.check(status, start, lambda: self.late(which, what), planning)

    def late(self, which: int, what: str) -> tuple[str, dict[str, int]]:
        """The first peer that has not begun (0) or finished (1) our call; a `Where`."""
        for peer, address in zip(self.peers, self.others[which], strict=True):
            if kernel.read_counter(address) < self.number:
                words = f"{self.name(self.rank)} waits for {self.name(peer)} to {what}"
                return words, {"rank": self.rank, "peer": peer}
        return f"{self.name(self.rank)} was about to go on", {"rank": self.rank}

    def interruptible(self, function: Any, *args: Any) -> int:
        """Call a compiled wait; if it is interrupted, this rank gives up."""
        try:
            return int(function(*args))
        except KeyboardInterrupt:
            self.give_up(INTERRUPTED)
            raise

    @contextmanager
    def alive(self, call: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Show signs of life to waiting ranks, and make a `call` with each from another thread."""
        if self._heart is None:
            beats = self.arena.words(self.arena.control(self.rank) + BEATS, 1)
            self._heart = _Heart(beats, self.timeout / 8)
            weakref.finalize(self, self._heart.stop).atexit = False
        self._heart.beats, self._heart.call = True, call
        try:
            yield
        finally:
            self._heart.beats, self._heart.call = False, lambda: None

    def _since(self, start: float, peer: int | None, planning: float) -> float:
        """From when on we have waited in vain: if for rank 0, which may be planning, from its last
        sign of life."""
        now = time.monotonic()
        if peer not in (0, None) or now - start > max(planning, self.allowance):
            return start  # None: the last peer has just come, perhaps rank 0
        beats = int(self.arena.words(self.arena.control(0) + BEATS, 1)[0])
        if beats != self._heard[0]:
            self._heard = beats, now
        return max(start, self._heard[1])

    def check(self, status: int, start: float, where: Where, planning: float = 0.0) -> None:
        """After a wait that was not fulfilled: raise if a rank has given up, died or left, or if
        `timeout` seconds have passed since `start`, or since rank 0's last sign of life in the
        seconds that it may be `planning`, or that `allowance` gives it."""
        if status == kernel.IDLE:
            words, fields = where()
            peer = fields.get("peer")
            self._waits[0] = 0 if peer is None else peer + 1
            dead = self._ended(self.arena.dead())  # first: a process ends soon after it has closed
            if left := self._ended(p for p in self.peers if self.arena.closed(p)):
                self.give_up(LEFT, left[0], left[0])
            elif dead:
                self.give_up(DIED, dead[0])
            elif (waited := time.monotonic() - self._since(start, peer, planning)) < self.timeout:
                if waited > PATIENT and self._told_of != start:
                    self._told_of = start
                    log.warning("%s for %.0f s so far", words, waited)
                return
            else:
                chain = self._chain(peer)
                self.give_up(TIMED_OUT, chain[-1] if chain else None)
                then = "".join(f", which waits for {self.name(r)}" for r in chain[1:])
                raise CollectiveTimeout(f"{words}{then} for {self.timeout:g} s", **fields)
        self.raise_aborted(where)

    def _chain(self, peer: int | None) -> list[int]:
        """The peer, the rank that the peer waits for, and so on, until a rank does not wait."""
        chain: list[int] = []
        while peer is not None and peer not in (self.rank, *chain):
            chain.append(peer)
            after = int(self.arena.words(self.arena.control(peer) + WAITS, 1)[0])
            peer = after - 1 if after else None
        return chain

    def _ended(self, peers: Any) -> list[int]:
        """Those of the given peers that have not finished this call; after it a rank may end."""
        finished = dict(zip(self.peers, self.others[1], strict=True))
        return [p for p in peers if kernel.read_counter(finished[p]) < self.number]

    def patience(self, start: float, where: Where) -> None:
        """To be polled while something else has been waiting since `start` (`time.monotonic`).
        Raises CollectiveTimeout or CollectiveAborted."""
        self.check(kernel.ABORTED if self.aborted() else kernel.IDLE, start, where)

    def aborted(self) -> bool:
        return bool(self.arena.abort[0])

    def give_up(self, why: int, blamed: int | None = None, who: int | None = None) -> None:
        """Abort all ranks: every wait, now or later, raises CollectiveAborted. `why` is one of the
        reasons in `diagnose`; `who` gives up (None: this rank), and blames `blamed` (None:
        itself)."""
        who = self.rank if who is None else who
        if self.aborted():
            return
        claimed = self.arena.base + self.arena.start + CLAIMED
        for claims in range(self.size):  # a rank that was first may have died before it said why
            if kernel.claim(claimed, claims, claims + 1):
                break
            until = time.monotonic() + _CLAIM
            while not self.aborted() and time.monotonic() < until:
                time.sleep(1e-4)
            if self.aborted():
                return
        self.arena.abort[1:4] = who, why, who if blamed is None else blamed
        kernel.raise_counter(self.arena.abort_address, 1, self.bells)

    def raise_aborted(self, where: Where | None = None) -> NoReturn:
        """Raise CollectiveAborted with the reason of the rank that gave up first."""
        _, who, why, blamed = (int(v) for v in self.arena.abort)
        stands, fields = where() if where else (f"{self.name(self.rank)} cannot go on", {})
        culprit = self.name(who)
        if why == DIED:
            culprit = f"{self.name(blamed)} (process {self.arena.pid(blamed)})"
        reason = f"{culprit} {REASONS[why]}"
        if why == TIMED_OUT:
            reason += f" for {self.name(blamed)}"
        elif why == DIFFERED:
            reason += f" {self.name(blamed)}"
        raise CollectiveAborted(f"{reason}; {stands}", **fields)

    def close(self) -> None:
        """Leave; wakes the peers that wait for this rank."""
        if self._heart:
            self._heart.stop()
        kernel.raise_counter(
            self.arena.base + self.arena.control(self.rank) + CLOSED, 1, self.bells
        )
        for offset, nbytes in self._sent:
            self.arena.free(offset, nbytes)
        self._sent.clear()
        self.notices.clear()
        self._waits = np.zeros(1, np.int64)  # views would keep the memory mapped
