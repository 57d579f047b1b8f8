"""Virtual ranks: threads of this process that share one GPU, or have one each."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from linkweave.collectives.communicator import Communicator
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.launch.default import set_of_thread
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.diagnose import INTERRUPTED, RAISED
from linkweave.collectives.runtime.gpu import executor as cuda
from linkweave.collectives.runtime.gpu.executor import GpuRanks
from linkweave.collectives.runtime.gpu.memory import LocalMemory
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings

GRACE = 5.0
"""Seconds that the other ranks have to end after one has failed."""


def consequence(error: BaseException | None) -> int:
    """How far from the cause an error is: a timeout may be, an abort always is another's doing."""
    return 2 if isinstance(error, CollectiveAborted) else isinstance(error, CollectiveTimeout)


class _Rank:
    """One thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.value: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


def spawn_threads(
    fn: Callable[..., Any], args: Sequence[Any], settings: Settings, gpus: Sequence[int]
) -> list[Any]:
    """`spawn` with a thread for each rank, rank r on GPU `gpus[r]`.

    A rank that goes on for `GRACE` seconds after another one's failure is left behind: a thread
    cannot be stopped from outside.
    """
    size = len(gpus)
    if len(set(gpus)) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise CollectiveError(
            "with CUDA_LAUNCH_BLOCKING one GPU's launch waits for the next one's, which never "
            "comes: use one process a GPU"
        )
    devices = [cuda.open_device(index) for index in gpus]
    ranks = [_Rank(r) for r in range(size)]
    memory = LocalMemory(devices, settings.peer_access == "require")
    team = Team(GpuRanks(dict(enumerate(devices)), memory, settings.timeout, settings.max_blocks))
    failed = threading.Event()
    open_ones: list[Communicator] = []

    def run(mine: _Rank, arena: Arena) -> None:
        communicator = None
        try:
            cuda.use_device(gpus[mine.rank])
            communicator = Communicator(arena, settings, team)
            open_ones.append(communicator)
            set_of_thread(communicator)
            mine.value = fn(mine.rank, *args)
        except BaseException as error:
            error.add_note(f"rank {mine.rank}:\n{traceback.format_exc()}")
            mine.error = error
            failed.set()
            if communicator is not None:
                communicator.abort(RAISED)
        finally:
            set_of_thread(None)
            try:
                if communicator is not None:
                    communicator.close()
            except Exception as error:
                mine.error = mine.error or error

    def wait() -> list[_Rank]:
        """Those that still run `GRACE` seconds after a failure."""
        deadline = None
        while running := [r for r in ranks if r.thread and r.thread.is_alive()]:
            if failed.is_set():
                deadline = deadline or time.monotonic() + GRACE
                if time.monotonic() > deadline:
                    break
            assert running[0].thread is not None
            running[0].thread.join(0.05)
        return running

    for mine, arena in zip(ranks, Arena.local(size), strict=True):
        name = f"linkweave-rank-{mine.rank}"
        mine.thread = threading.Thread(target=run, args=(mine, arena), name=name, daemon=True)
        mine.thread.start()
    try:
        running = wait()
    except BaseException:  # an interrupt: no rank may keep a GPU
        for communicator in open_ones:
            communicator.abort(INTERRUPTED)
        raise
    errors = [r.error for r in ranks if r.error is not None]
    try:
        if running:  # they may still use the team's memory
            names = ", ".join(str(r.rank) for r in running)
            print(f"linkweave: ranks {names} go on after a failure", file=sys.stderr)
        else:
            team.close()
    finally:
        if errors:
            raise min(errors, key=consequence)
    return [r.value for r in ranks]


def gpus_of(device: str, size: int) -> list[int]:
    """The GPU of each rank: "cuda:N" is one for all, "cuda" one each. Raises CollectiveError."""
    number = cuda.gpu_named(device)
    return list(range(size)) if number is None else [number] * size
