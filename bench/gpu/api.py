"""Rows of `bench.gpu_suite` through the public calls.

Ranks are threads or processes on one GPU. Covers tensors of CuPy and torch, several communicators
at once, CUDA graphs, and a rank that is killed.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.collectives import ours
from linkweave.bench.gpu.meter import machine_of
from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.bench.peers import IN_PLACE, given, room, wanted
from linkweave.collectives import get_default
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.collectives.planning.planner import candidates
from linkweave.collectives.runtime import reference
from linkweave.kernels.dtypes import DTYPES, ops_of


@dataclass(frozen=True)
class Arrays:
    """A library's arrays on the ranks' device, which is as in `spawn`."""

    name: str
    device: str = "cuda:0"

    def load(self) -> None:
        """Import the library, without use of CUDA. Raises LeftOut."""
        try:
            library = import_module(self.name)
        except ModuleNotFoundError as error:
            if self.name != "torch" or error.name != "torch":
                raise
            raise LeftOut("torch is not installed") from None
        if self.name == "torch" and self.device != "cpu" and library.version.cuda is None:
            raise LeftOut("this torch has no CUDA")

    def put(self, array: np.ndarray) -> Any:
        if self.name != "torch":
            return import_module(self.name).array(array)
        return import_module("torch").tensor(array, device=self.device.partition(":")[0])

    def put_patterns(self, array: np.ndarray, dtype: str) -> Any:
        """`put` of bit patterns of a dtype that NumPy lacks; None if this library lacks it too."""
        kind = getattr(import_module("torch"), dtype, None) if self.name == "torch" else None
        return None if kind is None else self.put(array).view(kind)

    def bytes_of(self, x: Any) -> np.ndarray:
        x = x.view(import_module("torch").uint8) if self.name == "torch" else x
        return self.get(x).view(np.uint8)

    def get(self, x: Any) -> np.ndarray:
        return x if self.name == "numpy" else x.get() if self.name == "cupy" else x.cpu().numpy()

    def seen(self, n: int) -> Any:
        """n float32 in memory that other ranks can access."""
        make = collectives.empty if self.device == "cpu" else collectives.symmetric_empty
        return make(n, import_module("torch").float32 if self.name == "torch" else "float32")


CupyArrays, TorchTensors = partial(Arrays, "cupy"), partial(Arrays, "torch")
NumpyArrays = partial(Arrays, "numpy", "cpu")


def exact(rank: int, n: int) -> np.ndarray:
    """n small integers, whose sums are exact in any order."""
    return ((np.arange(n) * 7 + rank * 3) % 5).astype(np.float32)


def same(got: np.ndarray, want: np.ndarray, what: str) -> int:
    """1, a result checked. Raises Failed, in one line, if values differ."""
    if got.shape != want.shape:
        raise Failed(f"{what} has shape {got.shape}, not {want.shape}")
    if not np.array_equal(got, want):
        at = int(np.flatnonzero((got != want).reshape(-1))[0])
        raise Failed(
            f"{what}: {int((got != want).sum())} of {got.size} elements are wrong, the first of "
            f"them [{at}], {got.reshape(-1)[at]} for {want.reshape(-1)[at]}"
        )
    return 1


def check_collectives(
    rank: int, arrays: Arrays, sizes: tuple[int, ...]
) -> tuple[int, int, list[str]]:
    """(results checked, checksum of sums of random numbers, algorithms that need more thread blocks
    than there are) on one rank. Raises Failed."""
    comm = get_default()
    size, of = comm.size, f"of {arrays.name} on rank {rank}"
    checked, skipped = check_algorithms(rank, arrays)
    checked += check_seen(rank, arrays)
    checked += check_dtypes(rank, arrays) + check_others(rank, arrays)
    for n in sizes:
        for kind in PUBLIC:
            before = given(kind, rank, size, n * size)
            empty = np.zeros(room(kind, size, n * size), np.float32)
            x, out = arrays.put(before), arrays.put(empty)
            want = wanted(kind, rank, size, n * size)
            ours(comm, kind, x, out, n * size)()
            comm.synchronize()
            got, untouched = (x, before) if kind in IN_PLACE else (out, empty)
            want = untouched if want is None else want
            checked += same(arrays.get(got), want, f"{kind} {of}, {n * size} elements")
        every, apart = [exact(r, n) for r in range(size)], arrays.put(np.zeros(n, np.float32))
        comm.allreduce(kept := arrays.put(every[rank]), "min", out=apart)
        work = comm.allreduce(w := arrays.put(every[rank]), op="max", async_op=True)
        work.wait(60)
        comm.synchronize()
        for got, want, name in (
            (w, np.max(every, axis=0), "asynchronous allreduce max"),
            (apart, np.min(every, axis=0), "allreduce min into another tensor"),
            (kept, every[rank], "what that allreduce was given,"),
        ):
            checked += same(arrays.get(got), want, f"{name} {of}, {n} elements")
    with comm.split(rank % 2) as part, comm.split() as again:  # at once
        x, y = arrays.put(exact(rank, sizes[-1])), arrays.put(exact(rank, sizes[-1]))
        works = [part.allreduce(x, async_op=True), again.allreduce(y, async_op=True)]
        for work in works:
            work.wait(60)
        for got, ranks in ((x, range(rank % 2, size, 2)), (y, range(size))):
            want = np.sum([exact(r, sizes[-1]) for r in ranks], axis=0)
            checked += same(arrays.get(got), want, f"allreduce of {len(ranks)} ranks at once {of}")
    noise = np.random.default_rng(rank).standard_normal(sizes[-1]).astype(np.float32)
    comm.allreduce(x := arrays.put(noise))
    comm.synchronize()
    return checked, zlib.crc32(arrays.get(x).tobytes()), skipped


def check_algorithms(rank: int, arrays: Arrays) -> tuple[int, list[str]]:
    """Check every algorithm on GPUs. Ranks of one GPU are compared with CPU ranks, bit for bit,
    with sums that depend on the order. Those of several GPUs are planned for by the GPUs' own
    links, and so add in an order of their own: their sums are exact."""
    comm, checked, skipped = get_default(), 0, dict[str, None]()
    if arrays.device == "cpu":
        return 0, []
    for name in candidates(comm.topology_for(arrays.put(exact(rank, 1)))):
        for n in (1009, 30_011):
            every = [np.random.default_rng([r, n]).standard_normal(n, np.float32)
                     for r in range(comm.size)]  # fmt: skip
            if arrays.device == "cuda":
                every = [np.round(1000 * x) for x in every]
            given = every[rank]
            x = arrays.put(given)
            try:
                comm.allreduce(x, algorithm=name)
            except collectives.CollectiveError as error:
                if "thread blocks" not in str(error):  # the same on all ranks
                    raise
                skipped[name] = None
                continue
            comm.synchronize()
            if arrays.device == "cuda":
                want = np.sum(every, axis=0)
            else:
                comm.allreduce(want := given.copy(), algorithm=name)
            what = f"allreduce by {name} of {arrays.name} on rank {rank}, {n} elements"
            checked += same(arrays.get(x), want, what)
    return checked, [*skipped]


def check_seen(rank: int, arrays: Arrays) -> int:
    """Check results that other ranks' GPUs write, several times in the same memory."""
    comm, n = get_default(), 100_003
    x, total = arrays.seen(n), np.sum([exact(r, n) for r in range(comm.size)], axis=0)
    ways = ("tree", "ring") * 2
    for name in ways:
        x[:] = arrays.put(exact(rank, n))
        comm.allreduce(x, algorithm=name)
        comm.synchronize()
        same(arrays.get(x), total, f"allreduce by {name} in memory that ranks share, rank {rank}")
    return len(ways)


def check_dtypes(rank: int, arrays: Arrays) -> int:
    """Check every dtype and op. Of each element one rank, a random one, has a number that counts,
    so that results are exact in any order."""
    comm, checked, n = get_default(), 0, 1009
    rng = np.random.default_rng(comm.size)
    counts, numbers = rng.integers(0, comm.size, n), rng.integers(0, 4, n).astype(np.float32)
    for dtype, about in DTYPES.items():
        for op in ops_of(dtype):
            neutral = {"prod": 1, "min": 3, "and": 3}.get(op, 0)
            given = [np.where(counts == r, numbers, neutral) for r in range(comm.size)]
            if about.stored == dtype:
                every, put = [x.astype(dtype) for x in given], arrays.put
            else:
                every = [reference.rounded(x.astype(np.float32), dtype) for x in given]
                put = partial(arrays.put_patterns, dtype=dtype)
            if (x := put(every[rank])) is None:
                continue
            comm.allreduce(x, op)
            comm.synchronize()
            divisor = comm.size if op == "avg" else 1
            want = reference.combine(every[0], every[1:], op, divisor, dtype)
            what = f"allreduce {op} of {dtype}, {arrays.name}, rank {rank}, byte by byte"
            checked += same(arrays.bytes_of(x), want.view(np.uint8), what)
    return checked


def check_others(rank: int, arrays: Arrays) -> int:
    """Check what has rows of unequal number, other roots, lists, layers or lanes."""
    comm, n = get_default(), 1009
    size, checked, of = comm.size, 0, f"of {arrays.name} on rank {rank}"
    every = [exact(r, n) for r in range(size)]
    total = np.sum(every, axis=0)
    comm.barrier()
    comm.broadcast(x := arrays.put(every[rank]), size - 1)
    comm.reduce(y := arrays.put(every[rank]), root=size - 1)
    comm.allreduce(two := [arrays.put(every[rank]), arrays.put(every[rank][:7])])
    comm.synchronize()
    checked += same(arrays.get(x), every[-1], f"broadcast from the last rank {of}")
    if rank == size - 1:
        checked += same(arrays.get(y), total, f"reduce to the last rank {of}")
    for got, want in zip(two, (total, total[:7]), strict=True):
        checked += same(arrays.get(got), want, f"allreduce of a list {of}")
    want = np.concatenate([x[: r + 1] for r, x in enumerate(every)])
    rows, mine = arrays.put(np.zeros_like(want)), arrays.put(every[rank][: rank + 1])
    comm.allgather(mine, counts=[*range(1, size + 1)], out=rows)
    comm.synchronize()
    checked += same(arrays.get(rows), want, f"allgather with counts {of}")
    want = np.concatenate([x[:size] for x in every] if rank == size - 1 else [every[0][:0]])
    rows, mine = arrays.put(np.zeros_like(want)), arrays.put(every[rank][:size])
    comm.alltoall(mine, rows, [0] * (size - 1) + [size])
    comm.synchronize()
    checked += same(arrays.get(rows), want, f"alltoall with splits {of}")
    queue = comm.allreduce_queue(x := arrays.put(every[rank]), [n - 100, 100])
    for layer in range(2):
        queue.dequeue(layer)
    queue.wait()
    comm.synchronize()
    checked += same(arrays.get(x), total, f"allreduce_queue {of}")
    lanes = comm.lanes(2)
    given = [arrays.put(every[rank]) for _ in lanes]
    works = [lane.allreduce(x, async_op=True) for lane, x in zip(lanes, given, strict=True)]
    for work, x in zip(works, given, strict=True):
        work.wait(60)
        checked += same(arrays.get(x), total, f"allreduce on lanes {of}")
    for lane in lanes:
        lane.close()
    return checked


def check_graph(rank: int, arrays: Arrays, n: int, replays: int) -> int:
    """Capture an all-reduce by torch and replay it; each replay doubles the values of 2 ranks."""
    import torch

    comm = get_default()
    given = torch.from_numpy(exact(rank, n))
    comm.allreduce(x := given.cuda())  # the first call synchronises on the host
    comm.synchronize()
    x.copy_(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.allreduce(x)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    comm.synchronize()
    total = sum(exact(each, n) for each in range(comm.size))
    same(x.cpu().numpy(), total * np.float32(comm.size ** (replays - 1)), "a graph's replays")
    return replays


def on_ranks(
    fn: Callable[..., Any], ranks: int, arrays: Arrays, *args: Any, virtual: bool = False,
    timeout: float = 30.0, peer_access: str = "prefer",
) -> list[Any]:  # fmt: skip
    """Results of `fn(rank, arrays, *args)` on ranks of the arrays' device; with `virtual`, of
    threads. Ranks of one GPU have a machine's links to plan for.

    The timeout is below a row's limit, as its error says which rank waits for which.
    """
    arrays.load()
    return collectives.spawn(
        fn, ranks, "auto" if arrays.device == "cuda" else machine_of(ranks), (arrays, *args),
        device=arrays.device, virtual=virtual, timeout=timeout, peer_access=peer_access,
    )  # fmt: skip


def run_ranks(
    arrays: Arrays, ranks: int, sizes: tuple[int, ...], virtual: bool, peer_access: str = "prefer"
) -> Result:
    found = on_ranks(
        check_collectives, ranks, arrays, sizes, virtual=virtual, peer_access=peer_access
    )
    if len({checksum for _, checksum, _ in found}) != 1:
        raise Failed(f"the ranks' sums differ: {[c for _, c, _ in found]}")
    return {"bytes": [4 * n for n in sizes], "checked": sum(checked for checked, *_ in found),
            "skipped": found[0][2]}  # fmt: skip


def killed(rank: int, arrays: Arrays, noticed: Path) -> None:
    """Rank 1 dies while rank 0 waits for it, which then makes the file `noticed`."""
    comm = get_default()
    x = arrays.put(np.ones(1000, np.float32))
    comm.allreduce(x)
    comm.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.allreduce(x)
        comm.synchronize()
    except collectives.CollectiveAborted:
        noticed.touch()


def run_killed(arrays: Arrays) -> Result:
    """Time until two processes end after one is killed; the deadline is 60 s."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        noticed = Path(folder) / "noticed"
        try:
            on_ranks(killed, 2, arrays, noticed, timeout=60)
        except collectives.CollectiveError as error:
            if "was killed by SIGKILL" not in str(error):
                raise
        else:
            raise Failed("no rank was killed")
        if not noticed.exists():
            raise Failed("nobody noticed that rank 1 had died")
    taken = time.perf_counter() - start
    if taken > 45:
        raise Failed(f"a dead rank was noticed after {taken:.0f} s")
    return {"seconds": taken}


def run_graph(arrays: Arrays, ranks: int = 2) -> Result:
    return {"checked": sum(on_ranks(check_graph, ranks, arrays, 5000, 3))}
