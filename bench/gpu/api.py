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
from linkweave.kernels.dtypes import DTYPES


@dataclass(frozen=True)
class Arrays:
    """A library's arrays on the ranks' device, which is as in `spawn`."""

    name: str
    device: str = "cuda:0"

    def load(self) -> None:
        """Import the library, without use of CUDA. Raises LeftOut."""
        try:
            library = import_module(self.name)
        except ImportError:
            if self.name != "torch":
                raise
            raise LeftOut("torch is not installed") from None
        if self.name == "torch" and self.device != "cpu" and library.version.cuda is None:
            raise LeftOut("this torch has no CUDA")

    def put(self, array: np.ndarray) -> Any:
        if self.name != "torch":
            return import_module(self.name).array(array)
        return import_module("torch").tensor(array, device=self.device.partition(":")[0])

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


def check_collectives(rank: int, arrays: Arrays, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(results checked, checksum of a sum of random numbers) on one rank. Raises AssertionError."""
    comm, checked = get_default(), 0
    size = comm.size
    checked += check_algorithms(rank, arrays) + check_seen(rank, arrays)
    if size == 2:
        checked += check_dtypes(rank, arrays)
    for n in sizes:
        for kind in PUBLIC:
            before = given(kind, rank, size, n * size)
            empty = np.zeros(room(kind, size, n * size), np.float32)
            x, out = arrays.put(before), arrays.put(empty)
            want = wanted(kind, rank, size, n * size)
            ours(comm, kind, x, out, n * size)()
            comm.synchronize()
            got, untouched = (x, before) if kind in IN_PLACE else (out, empty)
            np.testing.assert_array_equal(arrays.get(got), untouched if want is None else want)
            checked += 1
        every, apart = [exact(r, n) for r in range(size)], arrays.put(np.zeros(n, np.float32))
        comm.allreduce(kept := arrays.put(every[rank]), "min", out=apart)
        work = comm.allreduce(w := arrays.put(every[rank]), op="max", async_op=True)
        work.wait(60)
        comm.synchronize()
        for got, want in (
            (w, np.max(every, axis=0)),
            (apart, np.min(every, axis=0)),
            (kept, every[rank]),
        ):
            np.testing.assert_array_equal(arrays.get(got), want)
            checked += 1
    with comm.split(rank % 2) as part, comm.split() as again:  # at once
        x, y = arrays.put(exact(rank, sizes[-1])), arrays.put(exact(rank, sizes[-1]))
        works = [part.allreduce(x, async_op=True), again.allreduce(y, async_op=True)]
        for work in works:
            work.wait(60)
        for got, ranks in ((x, range(rank % 2, size, 2)), (y, range(size))):
            want = np.sum([exact(r, sizes[-1]) for r in ranks], axis=0)
            np.testing.assert_array_equal(arrays.get(got), want)
            checked += 1
    noise = np.random.default_rng(rank).standard_normal(sizes[-1]).astype(np.float32)
    comm.allreduce(x := arrays.put(noise))
    comm.synchronize()
    return checked, zlib.crc32(arrays.get(x).tobytes())


def check_algorithms(rank: int, arrays: Arrays) -> int:
    """Check every algorithm on GPUs against CPU ranks, bit for bit, with sums that depend on the
    order."""
    comm, checked = get_default(), 0
    if arrays.device == "cpu":
        return 0
    for name in candidates(comm.topology):
        for n in (1009, 30_011):
            given = np.random.default_rng([rank, n]).standard_normal(n).astype(np.float32)
            x = arrays.put(given)
            try:
                comm.allreduce(x, algorithm=name)
            except collectives.CollectiveError as error:
                if "thread blocks" not in str(error):  # the same on all ranks
                    raise
                continue
            comm.synchronize()
            comm.allreduce(given, algorithm=name)
            np.testing.assert_array_equal(arrays.get(x), given)
            checked += 1
    return checked


def check_seen(rank: int, arrays: Arrays) -> int:
    """Check results that other ranks' GPUs write, several times in the same memory."""
    comm, n = get_default(), 100_003
    x, total = arrays.seen(n), np.sum([exact(r, n) for r in range(comm.size)], axis=0)
    ways = ("tree", "ring") * 2
    for name in ways:
        x[:] = arrays.put(exact(rank, n))
        comm.allreduce(x, algorithm=name)
        comm.synchronize()
        np.testing.assert_array_equal(arrays.get(x), total)
    return len(ways)


def check_dtypes(rank: int, arrays: Arrays) -> int:
    comm, checked = get_default(), 0
    for dtype in (d for d, about in DTYPES.items() if about.stored == d):
        given = [exact(r, 1009).astype(dtype) for r in range(2)]
        for op, combine in (("sum", np.add), ("min", np.minimum), ("max", np.maximum),
                            ("prod", np.multiply)):  # fmt: skip
            comm.allreduce(x := arrays.put(given[rank]), op)
            comm.synchronize()
            np.testing.assert_array_equal(arrays.get(x), combine(*given))
            checked += 1
    return checked


def check_graph(rank: int, arrays: Arrays, n: int, replays: int) -> int:
    """Capture an all-reduce by torch and replay it; each replay doubles the values of 2 ranks."""
    import torch

    comm = get_default()
    x = torch.ones(n, device="cuda")
    comm.allreduce(x)  # the first call synchronises on the host
    comm.synchronize()
    x.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.allreduce(x)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    comm.synchronize()
    assert x.eq(float(comm.size**replays)).all().item(), x
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
    if len({checksum for _, checksum in found}) != 1:
        raise Failed(f"the ranks' sums differ: {[c for _, c in found]}")
    return {"bytes": [4 * n for n in sizes], "checked": sum(checked for checked, _ in found)}


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


def run_graph(arrays: Arrays) -> Result:
    return {"checked": sum(on_ranks(check_graph, 2, arrays, 5000, 3))}
