"""`spawn`: starts ranks as processes, or as threads that share GPUs."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from linkweave.collectives.calls.communicator import Communicator, set_default, set_of_thread
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.collectives.runtime.diagnose import DIED, INTERRUPTED, RAISED
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.device import use_device
from linkweave.collectives.runtime.gpu.driver import started
from linkweave.collectives.runtime.gpu.executor import GpuRanks
from linkweave.collectives.runtime.gpu.memory import LocalMemory
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings, topology_for
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer, shown

_FRESH = (
    ". This process runs other threads or has used CUDA, so each rank is a fresh Python that "
    "imports the program again: keep the call of spawn under `if __name__ == '__main__':`"
)


def spawn(
    fn: Callable[..., Any], nprocs: int, topology: Topology | str = "auto",
    args: Sequence[Any] = (), device: str = "cpu", virtual: bool = False,
    timeout: float | None = None, order: str = "fastest", max_blocks: int | None = None,
    peer_access: str = "prefer",
) -> list[Any]:  # fmt: skip
    """Run `fn(rank, *args)` on `nprocs` ranks, each with a default communicator.

    Ranks are processes. They are forked, which keeps closures and loaded modules, unless this
    process runs other threads or has used CUDA; then they are new interpreters, and `fn` and `args`
    must pickle. A notebook runs other threads; there, and wherever the program is no file, what it
    has defined goes to the ranks by value. torch uses one thread per rank.

    device: "cpu"; "cuda" for rank r on GPU r; "cuda:N" for all ranks on one GPU. The rank's GPU is
        the current one of CuPy and torch.
    virtual: start threads of this process instead, for GPUs only. The ranks' calls on a GPU are
        then one launch.
    topology, timeout, order, max_blocks, peer_access: see `Settings`.

    Returns the results by rank, which must pickle.
    Raises the exception of the first rank that fails, with a note that names it; CollectiveError
    for one that calls `sys.exit`. The other ranks are stopped, except threads that still run 5 s
    after the failure.
    """
    nprocs = integer(nprocs, "nprocs", 1)
    if mp.current_process().daemon:
        raise CollectiveError(
            "spawn was called in a daemonic process, such as a worker of a pool or a DataLoader, "
            "which may start no others: call it in the main process, or in one with daemon=False"
        )
    gpus = None if device == "cpu" else gpus_of(device, nprocs)
    if virtual and gpus is None:
        raise CollectiveError("virtual ranks share a GPU: say device='cuda:0'")
    read: Topology | str = "auto" if topology == "auto" else load(topology)
    settings = Settings(read, timeout, order, max_blocks, peer_access)
    topology_for(read, nprocs)  # raises here rather than on every rank
    if virtual and gpus is not None:
        return spawn_threads(fn, args, settings, gpus)
    forks = can_fork()
    context: Any = mp.get_context("fork" if forks else "spawn")
    if forks:
        compile_kernels()  # forked ranks inherit the machine code
    by_value = not forks and not os.path.exists(getattr(sys.modules["__main__"], "__file__", ""))
    hint = "" if forks or by_value else _FRESH
    what: Any = _by_value(fn, args) if by_value else (fn, args)
    with _within_limits():
        fd = Mapping.create(nprocs)
    ranks: list[_Rank] = []
    try:
        for rank in range(nprocs):
            gpu = None if gpus is None else gpus[rank]
            with _within_limits():
                ours, theirs = context.Pipe(duplex=False)
                try:
                    job = (what, rank, nprocs, settings, gpu, Mapping.location(fd), os.getpid())
                    process = context.Process(target=_child, args=(theirs, job), daemon=False)
                    with _without_file() if by_value else nullcontext():
                        process.start()
                except (AttributeError, TypeError, pickle.PicklingError) as error:
                    raise CollectiveError(
                        "this process runs other threads (or has used CUDA), so ranks cannot be "
                        f"forked and what they run must pickle: {error}"
                    ) from None
                theirs.close()
                ranks.append(_Rank(rank, process, ours, hint))
        return _gather(ranks, fd, nprocs)
    finally:
        for r in ranks:
            r.end()
        os.close(fd)


@contextmanager
def _without_file() -> Iterator[None]:
    """A main module whose file is "<stdin>" has none, which multiprocessing would look for."""
    main = vars(sys.modules["__main__"])
    file = main.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main["__file__"] = file


def _by_value(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        found: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:  # of whatever cannot be taken along
        raise CollectiveError(
            f"ranks of a notebook get what they run by value, which this is not: {error}"
        ) from error
    return found


def can_fork() -> bool:
    """Whether nothing of this process, such as a lock of another thread, would be left behind."""
    return threading.active_count() == 1 and not started()


@contextmanager
def _within_limits() -> Iterator[None]:
    """What the operating system refuses is an error that points to its limits."""
    try:
        yield
    except OSError as error:
        raise CollectiveError(
            f"ranks cannot be started: {error.strerror}; `ulimit -a` shows this process's limits"
        ) from error


class _Rank:
    """A child process, as seen by the parent."""

    def __init__(self, rank: int, process: Any, results: Connection, hint: str) -> None:
        self.rank, self.process, self.results, self.hint = rank, process, results, hint
        # not the process's sentinel, a pipe that what a rank forks holds open beyond its death
        try:
            self.ended = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.join()
            raise
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def collect(self) -> None:
        """Read the child's result, or find out how it died."""
        try:
            if not self.results.poll():  # the child ended; a process it forked holds the pipe open
                raise EOFError
            ok, payload = self.results.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            how = f"exited with status {code} without a result{self.hint}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            self.error = CollectiveError(f"rank {self.rank} (process {self.process.pid}) {how}")
        except Exception as error:  # the result's class cannot be unpickled here
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
        """End the process and free its resources."""
        if not self.done:
            self.process.kill()
        if not wait([self.ended], GRACE):
            self.process.kill()
        self.process.join()
        os.close(self.ended)
        self.results.close()
        self.process.close()


def _gather(ranks: list[_Rank], fd: int, size: int) -> list[Any]:
    waiting = list(ranks)
    first: _Rank | None = None
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        sources: dict[Any, _Rank] = {x: r for r in waiting for x in (r.results, r.ended)}
        ready = {sources[source].rank for source in wait(list(sources), left)}
        if not ready:
            break
        for r in [r for r in waiting if r.rank in ready]:
            waiting.remove(r)
            r.collect()
            if r.error is None:
                continue
            # an error that another rank's failure has caused is not the one to raise
            if first is None or consequence(r.error) < consequence(first.error):
                first = r
            if deadline is None:
                deadline = time.monotonic() + GRACE
                _abort(fd, r)
    if first is not None and first.error is not None:
        raise first.error
    return [r.value for r in ranks]


def _abort(fd: int, failed: _Rank) -> None:
    """Set the arena's abort flag, so that the other ranks stop waiting at once."""
    try:
        died = failed.process.exitcode is not None and failed.process.exitcode < 0
        fields = (failed.rank, DIED if died else RAISED, failed.rank)
        if not any(os.pread(fd, 8, 0)):
            os.pwrite(fd, b"".join(v.to_bytes(8, sys.byteorder) for v in fields), 8)
            os.pwrite(fd, (1).to_bytes(8, sys.byteorder), 0)  # last: the ranks wait for this word
    except OSError:
        pass  # the ranks then stop at their own deadlines


def _child(results: Connection, job: tuple[Any, ...]) -> None:
    what, rank, size, settings, gpu, path, parent = job
    die_with(parent)
    by_value = isinstance(what, bytes)
    dumps = cloudpickle.dumps if by_value else pickle.dumps
    gc.freeze()  # a collection would touch, and so copy, the pages inherited from the parent
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # ranks share the cores; a forked OpenMP pool would hang
    communicator, me = None, os.getpid()
    try:
        if gpu is not None:
            use_device(gpu)
        communicator = Communicator(Arena(Mapping.open(path, size, rank), rank), settings)
        set_default(communicator)
        fn, args = pickle.loads(what) if by_value else what
        value = fn(rank, *args)
        if os.getpid() != me:
            os._exit(0)  # this is a fork of the rank that returned from `fn`
        try:
            payload = dumps((True, value))
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
        payload = _failure(_told(error, rank), traceback.format_exc(), dumps)
    try:
        results.send_bytes(payload)
        results.close()
    finally:
        try:
            if communicator is not None:
                communicator.close()
        except Exception as error:  # `fn` is over, so that nobody else would tell
            words = f"{error}\n" if isinstance(error, CollectiveError) else traceback.format_exc()
            sys.stderr.write(f"rank {rank}: {words}")
        finally:
            set_default(None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # skips the parent's atexit handlers and threads


def _told(error: BaseException, rank: int) -> BaseException:
    """The error that `spawn` raises: one of a rank must not end the caller without a word."""
    if not isinstance(error, SystemExit):
        return error
    return CollectiveError(
        f"rank {rank} called sys.exit({'' if error.code is None else shown(error.code)}); a rank "
        "ends by returning"
    )


def _failure(error: BaseException, text: str, dumps: Callable[[Any], bytes]) -> bytes:
    """The pickled exception, or its text if it does not pickle."""
    try:
        payload = dumps((False, (error, text)))
        pickle.loads(payload)
        return payload
    except Exception:
        stand_in = CollectiveError(f"{type(error).__name__}: {error}")
        return pickle.dumps((False, (stand_in, text)))


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


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
            errors[rank] = _told(error, rank)
            errors[rank].add_note(f"rank {rank}:\n{traceback.format_exc()}")
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
