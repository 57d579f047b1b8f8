"""The check that ranks have the same parameters, and what is left of models that are dropped."""

from __future__ import annotations

import gc
import re
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from thread_ranks import ThreadTransport, on_threads
from torch import nn
from training_models import error_of, imported, made, sgd, train, units  # noqa: F401

from linkweave import collectives
from linkweave.collectives import DataParallel
from linkweave.collectives.training.checks import EVERY, PARTS, DivergenceCheck

SHAPES = ((7,), (), (40, 30), (0, 3), (3, 2, 5, 5), (513,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Parts(nn.Module):
    """Parameters of many shapes and dtypes, the same on all ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # ranks are threads
        for i, shape in enumerate(SHAPES):
            x = torch.randn(shape, generator=generator).to(DTYPES[i % len(DTYPES)])
            if x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            self.register_parameter(f"p{i}", nn.Parameter(x))

    def forward(self) -> torch.Tensor:
        return torch.stack([p.float().sum() for p in self.parameters()]).sum()


def planted(seed: int, transport: ThreadTransport) -> tuple[str, str, int]:
    """(what was changed on which rank, what was said, steps until then)."""
    model = Parts(seed)
    check = DivergenceCheck(units(model), transport)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    names = [name for name, p in model.named_parameters() if p.numel()]
    name, rank = rng.choice(names), int(rng.integers(transport.size))
    begun = int(rng.integers(1, 300))
    with torch.no_grad():
        p = dict(model.named_parameters())[name]
        x = p.as_strided((p.numel(),), (1,))
        raw = x.view(torch.uint8)
        at, bit = int(rng.integers(raw.numel())), int(rng.integers(8))
        for step in range(1, begun + 600):
            if step == begun and transport.rank == rank:
                raw[at] ^= 1 << bit
            if said := error_of(partial(check.step, step)):
                return f"{name} {rank}", said, step - begun
    return f"{name} {rank}", "", 600


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_bit_of_one_weight_is_found_and_named(size: int) -> None:
    """On three ranks or more, the rank that differs from the others; of two, either."""
    for seed in range(200 if size == 3 else 20):
        found, _ = on_threads(size, partial(planted, seed))
        assert len({(what, said) for what, said, _ in found}) == 1  # alike on all ranks
        what, said, steps = found[0]
        name, rank = what.split()
        assert steps <= EVERY * PARTS
        assert re.search(rf"ranks have parted: {name} of rank (\d) ", said), (what, said)
        if size > 2:
            assert f"{name} of rank {rank} differs" in said


@pytest.mark.usefixtures("imported")
@on_ranks(2)
def test_ranks_that_part_in_training_are_an_error_on_all(rank: int) -> None:
    found = []
    for options in ({"schedule": "ddp"}, {"schedule": "c-cube"},
                    {"exchange": collectives.GTopK(density=0.1)}):  # fmt: skip
        inner = made("cnn", torch.float32)
        optimizer = sgd(inner.parameters())
        model: Any = DataParallel(inner, optimizer, **options)
        batches = partial(_train, model, optimizer, rank)
        batches(3)
        if rank == 1:
            model.finish()
            with torch.no_grad():
                inner.last.bias[0] += 1e-6
        found.append(error_of(partial(batches, 2 * EVERY * PARTS)))
    assert all("ranks have parted: last.bias of rank" in said for said in found), found


def _train(model: Any, optimizer: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 1, 8, 8), 0.1 + rank)).sum().mul(1e-3).backward()
        optimizer.step()


@pytest.mark.usefixtures("imported")
@on_ranks(2)
def test_models_that_are_dropped_leave_no_threads_and_no_memory(rank: int) -> None:
    """(threads, MiB) that models leave behind which nobody has closed."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4 // 1024

    def use(schedule: str) -> None:
        inner = nn.Linear(1000, 1000)
        optimizer = sgd(inner.parameters())
        model = DataParallel(inner, optimizer, schedule=schedule)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        model.finish()

    for _ in range(2):
        use("wfbp")
        use("bytescheduler")
    gc.collect()
    threads, before = threading.active_count(), resident()
    for _ in range(20):
        use("wfbp")
        use("bytescheduler")
        gc.collect()
    until = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)  # the last ones are about to end
    assert threading.active_count() <= threads
    assert resident() - before < 60  # 40 models have 320 MiB of gradients
