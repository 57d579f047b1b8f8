"""Virtual ranks: threads of this process on one or several GPUs."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from linkweave.collectives.calls.communicator import Communicator, set_of_thread
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.diagnose import INTERRUPTED, RAISED
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.executor import GpuRanks
from linkweave.collectives.runtime.gpu.memory import LocalMemory
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings

GRACE = 5.0
"""Seconds in which the other ranks must end after one has failed."""


def consequence(error: BaseException | None) -> int:
    """Sort key of errors: 0 for a cause, 1 for a timeout (maybe one), 2 for an abort (never)."""
    return 2 if isinstance(error, CollectiveAborted) else isinstance(error, CollectiveTimeout)


def spawn_threads(
    fn: Callable[..., Any], args: Sequence[Any], settings: Settings, gpus: Sequence[int]
) -> list[Any]:
    """`spawn` with threads: rank r runs on GPU `gpus[r]`.

    A thread cannot be stopped from outside, so one that still runs `GRACE` seconds after another
    rank's failure is left running.
    """
    size = len(gpus)
    if len(set(gpus)) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise CollectiveError(
            "with CUDA_LAUNCH_BLOCKING the first GPU's launch waits for the second one's, which is "
            "never made: use one process a GPU"
        )
    devices = [cuda.open_device(index) for index in gpus]
    values: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    memory = LocalMemory(devices, settings.peer_access == "require")
    limits = settings.longest_on_gpus, settings.max_blocks
    team = Team(GpuRanks(dict(enumerate(devices)), memory, *limits))
    failed = threading.Event()
    open_ones: list[Communicator] = []

    def run(rank: int, arena: Arena) -> None:
        communicator = None
        try:
            cuda.use_device(gpus[rank])
            communicator = Communicator(arena, settings, team)
            open_ones.append(communicator)
            set_of_thread(communicator)
            values[rank] = fn(rank, *args)
        except BaseException as error:
            error.add_note(f"rank {rank}:\n{traceback.format_exc()}")
            errors[rank] = error
            failed.set()
            if communicator is not None:
                communicator.abort(RAISED)
        finally:
            set_of_thread(None)
            try:
                if communicator is not None:
                    communicator.close()
            except Exception as error:
                errors.setdefault(rank, error)

    def wait() -> list[int]:
        """Wait for the threads. Returns ranks that still run `GRACE` seconds after a failure."""
        deadline = None
        while running := [r for r, thread in enumerate(threads) if thread.is_alive()]:
            if failed.is_set():
                deadline = deadline or time.monotonic() + GRACE
                if time.monotonic() > deadline:
                    break
            threads[running[0]].join(0.05)
        return running

    threads = [
        threading.Thread(target=run, args=(r, arena), name=f"linkweave-rank-{r}", daemon=True)
        for r, arena in enumerate(Arena.local(size))
    ]
    for thread in threads:
        thread.start()
    try:
        running = wait()
    except BaseException:  # such as an interrupt: free the GPUs
        for communicator in open_ones:
            communicator.abort(INTERRUPTED)
        raise
    try:
        if running:  # these threads may still use the team's memory
            names = ", ".join(map(str, running))
            print(f"linkweave: ranks {names} still run after a failure", file=sys.stderr)
        else:
            team.close()
    finally:
        if errors:
            raise min((errors[r] for r in sorted(errors)), key=consequence)
    return [values[r] for r in range(size)]


def gpus_of(device: str, size: int) -> list[int]:
    """Each rank's GPU: "cuda:N" for all on one, "cuda" for one each. Raises CollectiveError."""
    number = cuda.gpu_named(device)
    return list(range(size)) if number is None else [number] * size
