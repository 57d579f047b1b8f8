"""Rows of `bench.gpu_suite` for gTop-k and sharded embeddings, a process a rank, all on one GPU.

What they compute on the GPU must have the bits of what the same ranks compute on the CPU.
"""

from __future__ import annotations

import time
import zlib
from statistics import median
from typing import Any

from linkweave import collectives
from linkweave.bench.gpu.api import Arrays, on_ranks
from linkweave.bench.gpu.runner import Failed, Result

ROWS, WIDTH, TOKENS = 1000, 37, 64
STEPS = 6
TRAINED, DENSITY = 120, 0.1
BELOW = 0.5  # of its first loss, what training by gTop-k must reach


def _compared(
    words: str, fn: Any, ranks: int, arrays: Arrays, *args: Any, device: str
) -> float:  # fmt: skip
    """Run `fn(rank, arrays, *args, device)`, which returns (checksum, seconds), on the device and
    on the CPU; the seconds of the slowest rank."""
    found, want = (on_ranks(fn, ranks, arrays, *args, on, timeout=60) for on in (device, "cpu"))
    for rank, (mine, its) in enumerate(zip(found, want, strict=True)):
        if mine[0] != its[0]:
            raise Failed(f"{words.format(rank)} has other bits than on the CPU")
    return max(seconds for _, seconds in found)


# ---- gTop-k -------------------------------------------------------------------------------------
def averaged(rank: int, arrays: Arrays, mode: str, n: int, device: str) -> tuple[int, float]:
    """(checksum of averages and residuals of some steps, the median seconds of an exchange) of n
    gradients."""
    import torch

    from linkweave.collectives.planning.sparse_tree import binomial_tree
    from linkweave.collectives.training.gtopk.exchange import SparseAverage
    from linkweave.collectives.training.gtopk.options import GTopK
    from linkweave.collectives.training.transport import OverCommunicator

    class OneTree(OverCommunicator):
        """The order of additions is that of the tree, which is planned for the device."""

        def tree(self, x: torch.Tensor) -> Any:
            return binomial_tree(self.size)

    transport = OneTree(collectives.get_default())
    transport.open(1)
    average = SparseAverage(transport, GTopK(0.001, mode=mode, conserve=True))
    generator = torch.Generator().manual_seed(rank)
    residual, found, times = torch.zeros(n, device=device), 0, []
    for step in range(STEPS):
        x = torch.randn(n, generator=generator).to(torch.bfloat16 if step % 2 else torch.float32)
        x = x.to(device)
        residual.sum().item()  # all is done
        begun = time.perf_counter()
        average(0, x, residual, [n // 3, n - n // 3], 0)
        residual.sum().item()
        times.append(time.perf_counter() - begun)
        for each in (x.float(), residual):
            found = zlib.crc32(each.cpu().numpy(), found)
    transport.close()
    return found, median(times)


def gtopk(arrays: Arrays, ranks: int, mode: str, n: int, device: str = "cuda") -> Result:
    seconds = _compared(f"{mode} on rank {{}}", averaged, ranks, arrays, mode, n, device=device)
    return {"ranks": ranks, "mode": mode, "elements": n, "exchange_s": seconds}


def losses(rank: int, arrays: Arrays, exchange: Any, device: str) -> list[float]:
    """The first and the last losses of a small model that learns from another one."""
    import torch
    from torch import nn

    torch.manual_seed(5)
    teacher, model = (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
                      for _ in range(2))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapped = collectives.DataParallel(model, optimizer, schedule="wfbp", exchange=exchange)
    generator, found = torch.Generator().manual_seed(100 + rank), []
    for _ in range(TRAINED):
        x = torch.randn(64, 32, generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), teacher(x).detach())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    wrapped.close()
    return [found[0], sum(found[-10:]) / 10]


def converge(arrays: Arrays, ranks: int, device: str = "cuda") -> Result:
    last = {}
    for name, exchange in (("dense", "dense"), ("gtopk", collectives.GTopK(DENSITY, mode="gtopk"))):
        rows = on_ranks(losses, ranks, arrays, exchange, device, timeout=60)
        first, last[name] = rows[0]
        if not last[name] < BELOW * first:
            raise Failed(f"{name}: a loss of {first:.3g} came down to {last[name]:.3g} only")
    return {"ranks": ranks, "density": DENSITY, "steps": TRAINED, "loss": last}


# ---- embeddings ---------------------------------------------------------------------------------
def rows_trained(rank: int, arrays: Arrays, kind: str, device: str) -> tuple[int, float]:
    """(checksum of the rows looked up in some steps and of the table after more, the mean seconds
    of the last ones)."""
    import torch
    from torch import nn

    from linkweave.collectives.training import ShardedEmbedding, prefetch

    torch.manual_seed(7)
    table = ShardedEmbedding(ROWS, WIDTH, 3, device=device)
    head = nn.Linear(1, 1).to(device)  # a model has a dense parameter
    optimizers = [getattr(torch.optim, kind)(table.parameters(), lr=0.1),
                  torch.optim.SGD(head.parameters(), 0.1)]  # fmt: skip
    model = collectives.DataParallel(nn.ModuleList([table, head]), optimizers, schedule="wfbp")
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(ROWS, (TOKENS,), generator=generator).to(device)
               for _ in range(2 * STEPS)]  # fmt: skip
    factors, seen = torch.arange(1.0, WIDTH + 1, device=device), 0  # of each column its own
    for step, ids in enumerate(prefetch(batches)):
        if step == STEPS:
            model.finish()
            begun = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = table(ids)
        # gradients are small integers, exact on all devices
        loss = (rows * factors).sum() + 0 * head(torch.ones(1, 1, device=device)).sum()
        loss.backward()
        if step < STEPS:
            seen = zlib.crc32(rows.detach().cpu().numpy(), seen)
        for optimizer in optimizers:
            optimizer.step()
    model.finish()
    whole = zlib.crc32(table.whole(table.weight).cpu().numpy(), seen)
    seconds = (time.perf_counter() - begun) / STEPS
    model.close()
    table.close()
    return whole, seconds


def embedding(arrays: Arrays, ranks: int, kind: str, device: str = "cuda") -> Result:
    words = f"{kind} on rank {{}}: the table"
    seconds = _compared(words, rows_trained, ranks, arrays, kind, device=device)
    return {"ranks": ranks, "optimizer": kind, "step_s": seconds}
