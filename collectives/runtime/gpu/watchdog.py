"""The watchdog: a thread that carries failures between a rank's GPU and the other ranks.

A kernel polls only words of its GPU and of its own process, whereas ranks report failures through
the arena. The watchdog reports a timeout on the GPU to the other ranks, and aborts the GPU's waits
within some hundredths of a second if another rank fails or dies.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu import control as host
from linkweave.collectives.runtime.cpu.control import HostControl
from linkweave.collectives.runtime.cpu.header import LAST_WORDS, MAX_MESSAGE
from linkweave.collectives.runtime.diagnose import DIED, DIFFERED, RAISED, TIMED_OUT
from linkweave.collectives.runtime.gpu.executor import GpuRanks

log = logging.getLogger("linkweave")

_PERIOD = 0.02  # s
_HEARING = 0.3  # s to wait for other ranks' last words


class Watchdog:
    """Watches `gpu` for the rank of `control`; `describe` returns that rank's latest call.

    Only the lowest rank of a process runs the thread.
    """

    def __init__(self, gpu: GpuRanks, control: HostControl, describe: Callable[[], str]) -> None:
        self._gpu, self._control, self._arena = gpu, control, control.arena
        self._describe = describe
        self._failure: CollectiveTimeout | CollectiveAborted | None = None
        self._over = False
        self._waiting_since: float | None = None  # infinite: told
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="linkweave-watch", daemon=True)
        if control.rank == min(gpu.devices):
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                if not self._look():
                    continue
                if self._gpu.describe_waits():
                    log.error("rank %d: %s", self._control.rank, self.failure())
            except Exception:  # without a watchdog nobody would end the GPU's waits
                log.exception("rank %d: its watchdog failed", self._control.rank)
                self._gpu.abort()
                self._control.give_up(RAISED)
            return

    def _look(self) -> bool:
        """Pass failures on in both directions; returns whether there is one."""
        with self._lock:
            if self._over:
                return True
            ours = self._gpu.aborted
            if not ours and not self._control.aborted():
                if (peer := self._arena.differing()) is not None:
                    self._control.give_up(DIFFERED, peer)
                elif (waiting := self._gpu.waiting()) and (dead := self._arena.dead()):
                    self._control.give_up(DIED, dead[0])
                else:
                    self._tell_of_long_waits(waiting)
                    return False
            self._gpu.abort()  # also after our own timeout, of which our other GPUs know nothing
            time.sleep(_PERIOD)  # until all thread blocks have reported their step
            if ours:
                self._failure = self._gpu.failure()
                if not self._control.aborted():
                    self._control.give_up(TIMED_OUT, self._failure.peer, self._failure.rank)
            if len(self._gpu.devices) == 1:
                words = f"{self._describe()}; {self._waits()}"
                self._arena.leave_message(words.encode()[:MAX_MESSAGE], LAST_WORDS)
            self._over = True
            return True

    def _tell_of_long_waits(self, waiting: bool) -> None:
        now = time.monotonic()
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > host.PATIENT:
            self._waiting_since = math.inf
            log.warning("rank %d has waited for %g s: %s", self._control.rank, host.PATIENT,
                        self._waits())  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether a failure has been found, or one of our GPUs reports one."""
        return self._over or self._gpu.aborted

    def check(self) -> None:
        """Raise CollectiveTimeout or CollectiveAborted if a rank has failed."""
        if self._look():
            raise self.failure()

    def failure(self) -> CollectiveError:
        """The error to raise: our own timeout, or the failure of the rank that made us stop.

        The message also says what the other ranks involved were doing.
        """
        if isinstance(self._failure, CollectiveTimeout):
            error = self._failure
            return CollectiveTimeout(f"{error}{self._last_words(error.peer)}", **error.fields())
        _, who, why, blamed = (int(v) for v in self._arena.abort)
        if why == DIFFERED:
            words = "".join(self._last_words(rank) for rank in sorted({who, blamed}))
            return CollectiveAborted(
                f"the ranks' calls on the GPU differ{words}", rank=who, peer=blamed
            )
        try:
            self._control.raise_aborted(lambda: (self._waits(), {"rank": self._control.rank}))
        except CollectiveAborted as aborted:
            return aborted

    def _waits(self) -> str:
        return self._gpu.describe_waits() or "nothing is under way on its GPU"

    def _last_words(self, peer: int | None) -> str:
        """What a rank of another process left at LAST_WORDS."""
        if peer is None or (len(self._gpu.devices) > 1 and peer in self._gpu.devices):
            return ""
        deadline = time.monotonic() + _HEARING
        while not (words := self._arena.message(peer, LAST_WORDS)) and time.monotonic() < deadline:
            time.sleep(_PERIOD)
        last = f"last: {words.decode(errors='ignore')}" if words else "says nothing"
        return f"; rank {peer} {last}"

    def close(self) -> None:
        """Stop the thread; afterwards the abort word and the reports are no longer read."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
