"""Ranks that take themselves for ranks on several machines: nothing but the network joins them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from on_ranks import as_test

from linkweave.collectives.cluster import join
from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.collectives.settings import Settings


def pretend(rank: int, sizes: Sequence[int], dealt: bool = False) -> None:
    """Make this rank believe that `sizes[0]` ranks are on the first machine, and so on; or that the
    ranks are `dealt` to the machines in turn."""
    machine = sum(end <= rank for end in accumulate(sizes))
    if dealt:
        machine = rank % len(sizes)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    join.machine_id = lambda: f"machine {machine}"
    join.socket.gethostname = lambda: f"host{machine}"  # type: ignore[attr-defined]


def forked(size: int, body: Callable[[int], Any], lost: Sequence[int] = ()) -> list[Any]:
    """What `body(rank)` returns in a fork for each rank, or the error that it raises as text.

    The ranks in `lost` are killed when the others have ended.
    """
    compile_kernels()  # which the forks inherit
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        found = manager.list([None] * size)

        def rank_of(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                found[rank] = body(rank)
            except Exception as error:
                found[rank] = f"{type(error).__name__}: {error}"

        ranks = [context.Process(target=rank_of, args=(rank,)) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 280  # before that of the test
        for rank, process in enumerate(ranks):
            if rank not in lost:
                process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in alive:
            ranks[rank].kill()
            ranks[rank].join()
        assert set(alive) <= {*lost}, f"ranks {alive} hang"
        return list(found)


def on_group(
    size: int, body: Callable[[int], Any], timeout: float = 60, lost: Sequence[int] = ()
) -> list[Any]:
    """`forked`, with `body(rank)` on ranks whose default group of torch.distributed is gloo's."""
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> Any:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
                timeout=timedelta(seconds=timeout),
            )  # fmt: skip
            return body(rank)

        return forked(size, rank_of, lost)


def on_machines(
    sizes: Sequence[int], body: Callable[..., Any], *args: Any, timeout: float = 60,
    lost: Sequence[int] = (), dealt: bool = False, order: str = "fastest",
) -> list[Any]:  # fmt: skip
    """`forked`, with `body(communicator, *args)` on ranks on machines of `sizes`."""
    total = sum(sizes)
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> Any:
            pretend(rank, sizes, dealt)
            store = c10d.FileStore(f"{folder}/store", total)
            store.set(f"started {rank}", "")  # not all start at once on a busy machine
            store.wait([f"started {r}" for r in range(total)], timedelta(seconds=250))
            job = join.Job(rank, total, store, "test")
            with join.meet(job, Settings(timeout=timeout, order=order)) as communicator:
                return body(communicator, *args)

        return forked(total, rank_of, lost)


def across(*machines: Sequence[int], **settings: Any) -> Callable[[Any], Any]:
    """Makes `body(communicator, ...)` a test on ranks on these machines, and one test for each of
    several such sizes, or as the parameter `machines` says. The body's other parameters are those
    of the test.

    settings: those of `on_machines`.
    """

    def make(body: Any) -> Any:
        def run(given: dict[str, Any], values: dict[str, Any]) -> None:
            sizes = given["machines"]
            found = on_machines(sizes, lambda comm: body(comm, **values), **settings)
            assert found == [None] * sum(sizes), found

        test = as_test(body, run, "machines")
        return pytest.mark.parametrize("machines", machines)(test) if machines else test

    return make
