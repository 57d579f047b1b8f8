"""What several tests of CPU ranks and of kernels share: arrays, and what calls raise."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linkweave.collectives import CollectiveError
from linkweave.collectives.planning.layout import block_table, staging
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.executor import memory_of
from linkweave.collectives.runtime.encoded import encode
from linkweave.kernels.plan import counters

TORCH_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16,
                torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]  # fmt: skip
KINDS = ("random", "constant", "ascending", "denormal", "special", "zeros", "one-hot", "halves",
         "huge steps")  # fmt: skip
GRADIENTS = dict(np.load(Path(__file__).parents[1] / "data" / "gradients.npz"))
"""Of a CNN on handwritten digits and of a small language model (`tests/data/make_gradients.py`)."""
NUMEL = 60


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The words of the CollectiveError that the call raises; empty if it raises none."""
    try:
        call(*args, **kwargs)
    except CollectiveError as error:
        return str(error)
    return ""


class RankPlans:
    """Carries out plans in place on one rank of a communicator, as the other ranks do too. A plan
    keeps its region, so that its counters go on."""

    def __init__(self, comm: Any) -> None:
        self.executor = comm._calls.executor
        self.ranks = (comm.rank,)
        self._regions: dict[Any, Any] = {}

    def execute(self, plan: Any, arrays: Sequence[np.ndarray], op: str = "sum") -> None:
        buffer, executor = buffer_of(arrays[0]), self.executor
        if (template := plan.with_chunks(plan.stride)) not in self._regions:
            encoded = encode(plan)
            start = executor.arena.reserve(memory_of(encoded)) if executor.rank == 0 else 0
            _, told = executor.control.gather((0,), start.to_bytes(8, "little"))
            start = int.from_bytes(told[0], "little")
            self._regions[template] = executor.load(encoded, start)
        message = plan.collective, plan.size, executor.rank, buffer.nbytes
        notice = np.array([plan.num_chunks, buffer.nbytes, -1, -1], np.int64)
        ready = executor.prepare(
            self._regions[template], notice, block_table(*message), plan.num_chunks, buffer, op,
            plan.algorithm, staging(*message, root=plan.root),
        )  # fmt: skip
        assert executor.run(ready, buffer.address)


def hurry(comm: Any, seconds: float) -> None:
    """From its next call on, this communicator waits for peers for so many seconds. Its ranks have
    started and planned under a longer timeout, as that takes long on a busy machine."""
    comm.barrier()
    comm._calls.control.timeout = seconds
    if comm._gpu is not None:
        comm._gpu.team.gpu.timeout = seconds
        comm._gpu._repeats.clear()  # launches that hold the old one


def others_have_called(comm: Any) -> None:
    """Wait until all other ranks have begun the next call on the CPU."""
    control = comm._calls.control
    while any(counters.read_counter(posted) <= control.number for posted in control.others[0]):
        time.sleep(0.002)


def outlive(path: Path, count: int) -> None:
    """Live on until so many ranks have each left a file in a folder."""
    deadline = time.monotonic() + 100
    while len([*path.iterdir()]) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def shared_files() -> set[str]:
    """What linkweave or torch has left in /dev/shm, which other programs use as well."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("linkweave", "torch_"))}


def values(rank: int, n: int, salt: int = 0) -> np.ndarray:
    """Sums that round differently in every order."""
    rng = np.random.default_rng([rank, n, salt])
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32)


def misaligned(x: np.ndarray) -> np.ndarray:
    """A copy that begins 4 bytes past a 64-byte boundary."""
    raw = np.empty(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    y = raw[start : start + x.nbytes].view(x.dtype)
    y[...] = x
    return y


def buffer_of(x: np.ndarray) -> Buffer:
    return Buffer(int(x.ctypes.data), x.nbytes, str(x.dtype), x.itemsize)


def row(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """A row of n values of that kind, which are hard to select from in ways of their own."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    x = rng.standard_normal(n).astype(np.float32)
    if kind == "constant":
        x[:] = -2.5
    elif kind == "ascending":
        x.sort()
    elif kind == "denormal":
        x = (x * 1e-41).astype(np.float32)
    elif kind == "special":
        x[rng.random(n) < 0.1] = np.nan
        x[rng.random(n) < 0.1] = -np.inf
        x.view(np.uint32)[rng.random(n) < 0.05] = 0xFFC12345  # another NaN
    elif kind == "zeros":
        x[rng.random(n) < 0.95] = 0
        x[rng.random(n) < 0.3] *= -1
    elif kind == "one-hot":
        x[:] = 0
        x[n // 3 : n // 3 + 1] = 1e-30
    elif kind == "halves":
        x = np.round(x * 2) / 2
    elif kind == "huge steps":  # what a sample of the row says little about
        x[:] = 1e-3
        x[: n // 700] = 1e3
    return x


def vector(rank: int, case: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices of a sparse vector of `NUMEL` elements."""
    rng = np.random.default_rng([rank, case])
    indices = np.sort(rng.choice(NUMEL, size, replace=False)).astype(np.int32)
    return rng.integers(-9, 10, size).astype(np.float32), indices


def dense(pair: tuple[np.ndarray, np.ndarray], numel: int = NUMEL) -> np.ndarray:
    out = np.zeros(numel, np.float32)
    out[pair[1]] = pair[0]
    return out
