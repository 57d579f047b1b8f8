"""Other libraries' collectives: gloo in our processes, MPI in processes of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from linkweave.bench.timing import schedule
from linkweave.collectives.planning.collective import COLLECTIVES, PUBLIC, Collective, Layout


class Gloo:
    """Two gloo groups over the ranks, with threads under SCHED_BATCH and the default policy. gloo
    has no allgatherv."""

    def __init__(self, rank: int, size: int, store: str, batch: bool) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.dist = dist
        schedule(False)  # a group's threads inherit the policy of the thread that makes it
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        self.default = dist.group.WORLD
        schedule(batch)
        self.batch: Any = dist.new_group(backend="gloo")

    def close(self) -> None:
        self.dist.destroy_process_group()


def single_calls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's all-gather into one tensor and reduce-scatter from one, which had other names before
    2.13."""
    import torch.distributed as dist

    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def by_torch(
    kind: str, given: Any, out: Any, count: int, group: Any = None, op: str = "sum"
) -> Callable[[], Any]:
    """A call of torch.distributed from `given`, in place or into `out`, of a message of `count`
    elements; the root is rank 0. Both are arrays of NumPy or tensors of torch."""
    import torch
    import torch.distributed as dist

    x, y = (a if isinstance(a, torch.Tensor) else torch.from_numpy(np.asarray(a))
            for a in (given, out))  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = list(y) if kind == "gather" and rank == 0 else None
    parts = list(x) if kind == "scatter" and rank == 0 else None
    all_gather_single, reduce_scatter_single = single_calls()
    mine, kind_of = splits(rank, size, count), getattr(dist.ReduceOp, op.upper())
    return {
        "allreduce": lambda: dist.all_reduce(x, kind_of, group),
        "broadcast": lambda: dist.broadcast(x, 0, group),
        "reduce": lambda: dist.reduce(x, 0, kind_of, group),
        "allgather": lambda: all_gather_single(y.view(-1), x, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(y, x, kind_of, group),
        "alltoall": lambda: dist.all_to_all_single(y, x, group=group),
        "alltoallv": lambda: dist.all_to_all_single(y, x, mine, mine, group=group),
        "gather": lambda: dist.gather(x, rows, group=group),
        "scatter": lambda: dist.scatter(y[0], parts, group=group),
    }[kind]


@contextmanager
def on_gloo() -> Iterator[None]:
    """The default process group of the ranks that torchrun has started, or of this process alone,
    each with one thread."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mpi_launcher() -> Path | None:
    """The mpiexec beside this interpreter or on PATH; None without MPI or mpi4py."""
    if find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return beside
    found = shutil.which("mpiexec")
    return Path(found) if found else None


class Mpi:
    """`size` MPI processes that time a collective on request and are stopped in between."""

    def __init__(self, launcher: Path, size: int) -> None:
        env = dict(os.environ)
        env["I_MPI_FABRICS"] = "shm"
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
        env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(launcher), "-n", str(size), sys.executable, "-m", "linkweave.bench.mpi_rank"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            cwd=Path(__file__).parents[2], env=env, start_new_session=True,
        )  # fmt: skip
        hello = self._line()
        if not hello.startswith("ready "):
            self.close()
            raise OSError(f"MPI did not start: {hello or self._errors()}")
        _, name, *pids = hello.split("\t")
        self.name = name
        self.pids = [int(p) for p in pids]
        self.pause()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _errors(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-500:]

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def pause(self) -> None:
        """Stop the MPI ranks, which would otherwise spin and occupy the cores."""
        self._signal(signal.SIGSTOP)

    def time(self, kind: str, nbytes: int, iterations: int) -> tuple[list[float], int]:
        """Return the seconds of each iteration on the slowest rank, and wrong elements."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {nbytes} {iterations}\n")
        self.process.stdin.flush()
        words = self._line().split()
        self.pause()
        if not words:
            raise OSError(f"MPI failed: {self._errors()}")
        return [float(w) for w in words[1:]], int(words[0])

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def timed(
    call: Callable[[], Any], prepare: Callable[[], None], meet: Callable[[], None], iterations: int
) -> list[float]:
    """Seconds of each call on this rank. `prepare` and `meet` run before each call."""
    found = []
    for _ in range(iterations):
        prepare()
        meet()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


KINDS = (*PUBLIC, "allgatherv", "alltoallv")
IN_PLACE = tuple(kind for kind in PUBLIC if COLLECTIVES[kind].layout is Layout.WHOLE)
"""Those that work in place."""

Array = np.ndarray[Any, Any]


def pattern(rank: int, count: int) -> Array:
    return (np.arange(count) % 251).astype(np.float32) + np.float32(rank)


def collective(kind: str) -> Collective:
    return COLLECTIVES[kind.removesuffix("v")]


def splits(rank: int, size: int, count: int) -> list[int]:
    """Unequal parts of `count` elements: what a rank sends to each rank in an alltoallv; rank 0's
    are what the ranks give in an allgatherv. So many come to each rank as it sends."""
    each = count // size
    found = [each + (1 - 2 * (r % 2)) * (each // 2) for r in range(size - size % 2)]
    found += [each] * (size % 2)
    return found[rank:] + found[:rank]


def given(kind: str, rank: int, size: int, count: int) -> Array:
    """What a rank gives, for a message of `count` float32. Rows, where these are dealt out."""
    if kind == "allgatherv":
        return pattern(rank, splits(0, size, count)[rank])
    if kind == "alltoallv":
        return pattern(rank, sum(splits(rank, size, count)))
    if kind in ("allgather", "gather"):
        return pattern(rank, count // size)
    x = pattern(rank, count)
    return x if kind in IN_PLACE else x.reshape(size, -1)


def room(kind: str, size: int, count: int) -> tuple[int, ...]:
    if kind in IN_PLACE:
        return (0,)
    if kind.endswith("v"):
        return (sum(splits(0, size, count)),)
    rows = 1 if kind in ("reduce_scatter", "scatter") else size
    return rows, count // size


def wanted(kind: str, rank: int, size: int, count: int, op: str = "sum") -> Array | None:
    """What a rank gets, by "sum" or "max"; None if that is nobody's business."""
    if kind in ("reduce", "gather") and rank:
        return None
    every = [given(kind, r, size, count) for r in range(size)]
    found: Array = every[0]
    if kind == "alltoallv":
        parts = [np.split(x, np.cumsum(splits(r, size, count))) for r, x in enumerate(every)]
        return np.concatenate([of[rank] for of in parts])
    if kind == "allgatherv":
        return np.concatenate(every)
    if COLLECTIVES[kind].combines:
        found = (np.sum if op == "sum" else np.max)(every, axis=0)
    elif kind == "alltoall":
        found = np.stack([x[rank] for x in every])
    elif kind in ("allgather", "gather"):
        found = np.stack(every)
    return found[rank : rank + 1] if kind in ("reduce_scatter", "scatter") else found


def busbw(kind: str, size: int) -> float:
    """The bytes on the busiest link, as a share of the message (nccl-tests, PERFORMANCE.md)."""
    if kind in ("broadcast", "reduce"):
        return 1.0
    return (2 if kind == "allreduce" else 1) * (size - 1) / size
