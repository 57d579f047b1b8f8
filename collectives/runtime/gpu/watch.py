"""What stands between a GPU that waits and the other ranks: a thread that carries bad news.

A kernel looks at one word of its own process; ranks tell each other through the arena. The watch
takes a deadline that has passed on a GPU to the other ranks, and their failures and deaths to the
GPU, which is free within some hundredths of a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.arena import LAST_WORDS, MOST_SAID
from linkweave.collectives.runtime.cpu.control import HostControl
from linkweave.collectives.runtime.diagnose import DIED, DIFFERED, RAISED, TIMED_OUT
from linkweave.collectives.runtime.gpu.executor import GpuRanks

log = logging.getLogger("linkweave")

_PERIOD = 0.02  # s
_HEARING = 0.3  # s that other ranks have to say where they stand


class Watch:
    """Watches `gpu` for the rank of `control`; `describe` tells what that rank did last.

    Of the ranks of one process one has a thread for it.
    """

    def __init__(self, gpu: GpuRanks, control: HostControl, describe: Callable[[], str]) -> None:
        self._gpu, self._control, self._arena = gpu, control, control.arena
        self._describe = describe
        self._failure: CollectiveTimeout | CollectiveAborted | None = None
        self._over = False
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
                if self._gpu.stands():
                    log.error("rank %d: %s", self._control.rank, self.failure())
            except Exception:  # without a watch nobody would free the GPU
                log.exception("rank %d: its watch failed", self._control.rank)
                self._gpu.abort()
                self._control.give_up(RAISED)
            return

    def _look(self) -> bool:
        """Carry news either way; whether there were bad ones."""
        with self._lock:
            if self._over:
                return True
            ours = self._gpu.aborted
            if not ours:
                if not self._control.aborted():
                    if (peer := self._arena.differing()) is not None:
                        self._control.give_up(DIFFERED, peer)
                    elif self._gpu.waiting() and (dead := self._arena.dead()):
                        self._control.give_up(DIED, dead[0])
                    else:
                        return False
                self._gpu.abort()
            time.sleep(_PERIOD)  # until all width have said where they stood
            if ours:
                self._failure = self._gpu.failure()
                if not self._control.aborted():
                    self._control.give_up(TIMED_OUT, self._failure.peer, self._failure.rank)
            if len(self._gpu.devices) == 1:
                words = f"{self._describe()}; {self._stands()}"
                self._arena.say(words.encode()[:MOST_SAID], LAST_WORDS)
            self._over = True
            return True

    def check(self) -> None:
        """Raise CollectiveTimeout or CollectiveAborted if a rank has failed."""
        if self._look():
            raise self.failure()

    def failure(self) -> CollectiveError:
        """What is to be raised: our own deadline, or in whose name we stopped; where others
        stood."""
        if isinstance(self._failure, CollectiveTimeout):
            error = self._failure
            return CollectiveTimeout(f"{error}{self._heard(error.peer)}", **error.fields())
        _, who, why, blamed = (int(v) for v in self._arena.abort)
        if why == DIFFERED:
            said = "".join(self._heard(rank) for rank in sorted({who, blamed}))
            return CollectiveAborted(
                f"the ranks' calls on the GPU differ{said}", rank=who, peer=blamed
            )
        try:
            self._control.raise_aborted(lambda: (self._stands(), {"rank": self._control.rank}))
        except CollectiveAborted as aborted:
            return aborted

    def _stands(self) -> str:
        return self._gpu.stands() or "nothing is under way on its GPU"

    def _heard(self, peer: int | None) -> str:
        """Where a rank of another process says it stood."""
        if peer is None or (len(self._gpu.devices) > 1 and peer in self._gpu.devices):
            return ""
        deadline = time.monotonic() + _HEARING
        while not (said := self._arena.said(peer, LAST_WORDS)) and time.monotonic() < deadline:
            time.sleep(_PERIOD)
        return f"; rank {peer} last: {said.decode(errors='ignore')}" if said else (
            f"; rank {peer} says nothing"
        )  # fmt: skip

    def close(self) -> None:
        """Stop watching; afterwards the GPU's words are read no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
