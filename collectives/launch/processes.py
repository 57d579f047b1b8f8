"""Starting ranks: `spawn` makes processes, or threads that share GPUs."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from linkweave.collectives.communicator import Communicator
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.launch.default import set_default
from linkweave.collectives.launch.threads import GRACE, consequence, gpus_of, spawn_threads
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.collectives.runtime.diagnose import DIED, RAISED
from linkweave.collectives.runtime.gpu.driver import started
from linkweave.collectives.runtime.gpu.executor import use_device
from linkweave.collectives.settings import Settings, topology_for
from linkweave.topology import Topology, load


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    topology: Topology | str = "auto",
    args: Sequence[Any] = (),
    device: str = "cpu",
    virtual: bool = False,
    timeout: float = 30.0,
    order: str = "fastest",
    max_blocks: int | None = None,
    peer_access: str = "prefer",
) -> list[Any]:
    """Run `fn(rank, *args)` on `nprocs` ranks with the default communicator ready.

    `device`: "cpu"; "cuda", rank r on GPU r; "cuda:N", all on one GPU. That GPU is the current one
    of CuPy and torch. Ranks are processes; with `virtual` (GPUs only) threads of this process,
    whose calls on a GPU are launched as one. The other arguments are those of `Settings`.

    Returns the results by rank (they must pickle). The first failing rank's exception is raised
    again with its rank; the others are stopped, no process is left (a thread that goes on for 5 s
    after a failure is). Processes are forked, which keeps closures and loaded modules, unless this
    process runs other threads or has used CUDA: then they are started afresh and `fn` must pickle.
    torch gets one thread a rank.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise CollectiveError(f"nprocs must be an integer of at least 1, not {nprocs!r}")
    gpus = None if device == "cpu" else gpus_of(device, nprocs)
    if virtual and gpus is None:
        raise CollectiveError("virtual ranks share a GPU: say device='cuda:0'")
    read: Topology | str = "auto" if topology == "auto" else load(topology)
    settings = Settings(read, timeout, order, max_blocks, peer_access)
    topology_for(read, nprocs)  # refused here rather than on every rank
    if virtual and gpus is not None:
        return spawn_threads(fn, args, settings, gpus)
    context: Any = mp.get_context("fork" if _fork_is_safe() else "spawn")
    if context.get_start_method() == "fork":
        compile_kernels()  # so that the forked ranks find the machine code in memory
    fd = Mapping.create(nprocs)
    ranks: list[_Rank] = []
    try:
        for rank in range(nprocs):
            ours, theirs = context.Pipe(duplex=False)
            gpu = None if gpus is None else gpus[rank]
            job = (fn, args, rank, nprocs, settings, gpu, Mapping.location(fd), os.getpid())
            process = context.Process(target=_child, args=(theirs, job), daemon=False)
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise CollectiveError(
                    "this process runs other threads (or has used CUDA), so ranks cannot be "
                    f"forked and what they run must pickle: {error}"
                ) from None
            theirs.close()
            ranks.append(_Rank(rank, process, ours))
        return _gather(ranks, fd, nprocs)
    finally:
        for r in ranks:
            r.end()
        os.close(fd)


class _Rank:
    """A child process as its parent sees it."""

    def __init__(self, rank: int, process: Any, results: Connection) -> None:
        self.rank, self.process, self.results = rank, process, results
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def collect(self) -> None:
        """Read what the child sent, or find out how it died."""
        try:
            if not self.results.poll():  # ended, and a process of its own holds the pipe open
                raise EOFError
            ok, payload = self.results.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else (f"exited with status {code} without a result")
            )
            self.error = CollectiveError(f"rank {self.rank} (process {self.process.pid}) {how}")
        except Exception as error:  # a result whose class cannot be rebuilt here
            self.error = CollectiveError(f"rank {self.rank}'s result cannot be read: {error!r}")
        else:
            if ok:
                self.value = payload
            else:
                self.error, text = payload
                assert self.error is not None
                self.error.add_note(f"rank {self.rank}:\n{text}")
        self.done = True

    def end(self) -> None:
        """Leave no process behind."""
        if self.process.is_alive() and not self.done:
            self.process.kill()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.results.close()
        self.process.close()


def _gather(ranks: list[_Rank], fd: int, size: int) -> list[Any]:
    waiting = list(ranks)
    first: _Rank | None = None
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        signs = {sign: r for r in waiting for sign in (r.results, r.process.sentinel)}
        ready = {signs[sign].rank for sign in wait(list(signs), left)}
        if not ready:
            break
        for r in [r for r in waiting if r.rank in ready]:
            waiting.remove(r)
            r.collect()
            if r.error is None:
                continue
            # a rank that only stopped because of another's failure is not the cause
            if first is None or consequence(r.error) < consequence(first.error):
                first = r
            if deadline is None:
                deadline = time.monotonic() + GRACE
                _abort(fd, size, r)
    if first is not None and first.error is not None:
        raise first.error
    return [r.value for r in ranks]


def _abort(fd: int, size: int, failed: _Rank) -> None:
    """Tell the others through the arena, so that they stop waiting at once."""
    try:
        died = failed.process.exitcode is not None and failed.process.exitcode < 0
        header = [1, failed.rank, DIED if died else RAISED, failed.rank]
        current = int.from_bytes(os.pread(fd, 8, 0), sys.byteorder)
        if not current:
            body = b"".join(v.to_bytes(8, sys.byteorder) for v in header[1:])
            os.pwrite(fd, body, 8)
            os.pwrite(fd, header[0].to_bytes(8, sys.byteorder), 0)
    except OSError:
        pass  # the ranks' own deadline remains


def _child(results: Connection, job: tuple[Any, ...]) -> None:
    fn, args, rank, size, settings, gpu, path, parent = job
    _die_with(parent)
    gc.freeze()  # a collection would copy every page that holds what the parent has loaded
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # ranks share the cores; a forked OpenMP pool would hang
    communicator, me = None, os.getpid()
    try:
        if gpu is not None:
            use_device(gpu)
        communicator = Communicator(Arena(Mapping.open(path, size, rank), rank), settings)
        set_default(communicator)
        value = fn(rank, *args)
        if os.getpid() != me:
            os._exit(0)  # a process that the rank forked, and that came back from `fn`
        try:
            payload = pickle.dumps((True, value))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise CollectiveError(
                f"rank {rank}'s result, a {type(value).__qualname__}, does not pickle: {error}"
            ) from None
    except BaseException as error:
        if os.getpid() != me:
            code = error.code if isinstance(error, SystemExit) else 1
            os._exit(code if isinstance(code, int) else int(code is not None))
        if communicator is not None:
            communicator.abort(RAISED)
        payload = _failure(error, traceback.format_exc())
    try:
        results.send_bytes(payload)
        results.close()
    finally:
        if communicator is not None:
            communicator.close()
        set_default(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no atexit handlers of the parent, no joins of its threads


def _failure(error: BaseException, text: str) -> bytes:
    """The exception pickled, or its text where it does not pickle."""
    try:
        payload = pickle.dumps((False, (error, text)))
        pickle.loads(payload)
    except Exception:
        stand_in = CollectiveError(f"{type(error).__name__}: {error}")
        payload = pickle.dumps((False, (stand_in, text)))
    return payload


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies: no orphans."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _fork_is_safe() -> bool:
    return threading.active_count() == 1 and not started()
