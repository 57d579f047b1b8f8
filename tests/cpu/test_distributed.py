"""The torch.distributed backend "linkweave", beside gloo in the same processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # which DDP imports: here once, not in every rank
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from machines import forked, pretend
from on_ranks import as_test
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh

import linkweave
from linkweave.collectives import CollectiveError, CollectiveTimeout
from linkweave.collectives.distributed.group import GroupWork
from linkweave.torch_backend import register
from tests.cpu.helpers import hurry

ROOT = Path(__file__).parents[2]


def run(
    size: int, body: Callable[..., Any], *args: Any, backend: str = "linkweave",
    machines: Sequence[int] = (),
) -> list[Any]:  # fmt: skip
    """What `body(rank, *args)` returns on each rank, or the error that it raises as text."""
    register()
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> Any:
            if machines:
                pretend(rank, machines)
            dist.init_process_group(
                backend, init_method=f"file://{folder}/store", rank=rank, world_size=size,
                timeout=timedelta(seconds=200),
            )  # fmt: skip
            found = body(rank, *args)
            dist.destroy_process_group()
            return found

        return forked(size, rank_of)


def in_group(size: int, *params: str) -> Callable[[Any], Any]:
    """Makes `body(rank, ...)` a test on so many ranks. params: arguments of `run` that are
    parameters of the test, as are those of the body."""

    def make(body: Any) -> Any:
        def test(given: dict[str, Any], values: dict[str, Any]) -> None:
            how = {name: given[name] for name in params}
            assert run(size, lambda rank: body(rank, **values), **how) == [None] * size

        return as_test(body, test, *params)

    return make


def both(rank: int) -> bool:
    """Whether linkweave's group gives what gloo gives."""
    gloo = dist.new_group(backend="gloo")
    assert "linkweave" in dist.get_backend()
    for calls in (reductions, movements, handles):
        mine, theirs = (calls(rank, dist.get_world_size(), group) for group in (None, gloo))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return True


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(n) * 7 + rank * 3) % 5).to(dtype)


def reductions(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    found = []
    ops = dist.ReduceOp
    dtypes = (torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)
    kinds = [(op, torch.float32) for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX)]
    for op, dtype in [*kinds, *((ops.SUM, dtype) for dtype in dtypes)]:
        dist.all_reduce(x := values(rank, 13, dtype), op, group=group)
        found.append(x)
    dist.reduce(y := values(rank, 1000), size - 1, group=group)
    found += [y] * (rank == size - 1)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        dist.all_reduce(x := values(rank, 5, torch.int64), op, group=group)
        found.append(x)
    dist.all_reduce(y := values(rank, 12).view(3, 4).t(), group=group)  # strided
    dist.all_reduce(z := torch.empty(0), group=group)
    return [*found, x, y, z]


def movements(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    x = values(rank, 6).view(2, 3)
    dist.broadcast(one := values(rank, 7), 0, group=group)
    dist.all_gather(every := [torch.zeros(2, 3) for _ in range(size)], x, group=group)
    dist.all_gather_single(whole := torch.zeros(2 * size, 3), x, group=group)
    dist.reduce_scatter_single(part := torch.zeros(3), values(rank, 3 * size), group=group)
    dist.reduce_scatter(row := torch.zeros(4), [values(r, 4) for r in range(size)], group=group)
    dist.all_to_all_single(even := torch.zeros(2 * size), values(rank, 2 * size), group=group)
    sent, got = [rank + 1] * size, [r + 1 for r in range(size)]
    uneven = torch.zeros(sum(got), 2)
    dist.all_to_all_single(uneven, values(rank, 2 * sum(sent)).view(-1, 2), got, sent, group=group)
    blocks = [torch.zeros(2, 2) for _ in range(size)]
    dist.all_to_all(blocks, [values(rank + r, 4).view(2, 2) for r in range(size)], group=group)
    dist.gather(x, rows := [torch.zeros(2, 3) for _ in range(size)] if not rank else None,
                group=group)  # fmt: skip
    dist.scatter(mine := torch.zeros(3), [values(r, 3) for r in range(size)] if not rank else None,
                 group=group)  # fmt: skip
    last = size - 1  # a root other than 0, results that are not contiguous
    late = [torch.zeros(3, 2).t() for _ in range(size)]
    work = dist.gather(x, late if rank == last else None, last, group=group, async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed():  # which says that the result is there
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [one, *every, whole, part, row, even, uneven, *blocks, *(rows or []), mine,
            *(late if rank == last else [])]  # fmt: skip


def handles(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Asynchronous calls, futures, coalesced calls, objects, point to point."""
    works = [dist.all_reduce(x := values(rank, 100), group=group, async_op=True),
             dist.all_gather(y := [torch.zeros(9) for _ in range(size)], values(rank, 9),
                             group=group, async_op=True)]  # fmt: skip
    for work in works:
        work.wait()
        assert work.is_completed()
    future = dist.all_reduce(z := values(rank, 50), group=group, async_op=True).get_future()
    (value,) = future.then(lambda done: [done.value()[0] * 2]).wait()
    with dist._coalescing_manager(group=group):
        for n in (3, 30):
            dist.all_reduce(w := values(rank, n), group=group)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [values(rank, 2), values(rank, 3)], group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(size)]
    t = values(rank, 4)
    if size > 1 and rank < 2:
        (dist.send if rank == 0 else dist.recv)(t, 1 - rank, group=group, tag=3)
    dist.barrier(group=group)
    return [x, *y, z, value, w, t, *(part for row in lists for part in row)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_calls_give_what_gloo_gives(size: int) -> None:
    assert run(size, both) == [True] * size


@pytest.mark.parametrize("machines", [pytest.param((2, 2), marks=pytest.mark.slow), (1, 2)])
def test_calls_over_machines_give_what_gloo_gives(machines: tuple[int, ...]) -> None:
    assert run(sum(machines), both, machines=machines) == [True] * sum(machines)


@in_group(2)
def test_the_profiler_shows_calls(rank: int) -> None:
    """What torch.profiler shows of the calls: torch's names, the group, shapes."""
    part = dist.new_group([0, 1])
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x := torch.ones(3, 4))
        dist.all_reduce(x, group=part, async_op=True).wait()
        dist.gather(x, [torch.zeros(3, 4) for _ in range(2)] if rank == 0 else None)
        dist.barrier()
    keys = profile.key_averages(group_by_input_shape=True)
    found = sorted(f"{e.key} {e.input_shapes}" for e in keys if e.key.startswith("linkweave:"))
    first, other, barrier, gathered = found
    assert barrier.startswith("linkweave:barrier (group 0) ")
    assert first.startswith("linkweave:all_reduce (group 0) [[3, 4]")
    assert other.startswith("linkweave:all_reduce (group ") and not other.startswith(first)
    assert gathered.startswith("linkweave:gather (group 0) [[12]")


@in_group(3)
def test_a_gather_into_one_tensor(rank: int) -> None:
    """As torch makes it since 2.14."""
    group: Any = dist.group.WORLD
    opts = torch._C._distributed_c10d.GatherOptions()
    opts.rootRank = 1
    whole = torch.zeros(3, 5) if rank == 1 else torch.empty(0)
    group.gather_single(whole, values(rank, 5), opts).wait()
    if rank == 1:
        assert torch.equal(whole, torch.stack([values(r, 5) for r in range(3)]))
    opts.rootRank = rank  # nothing is sent
    with pytest.raises(ValueError, match=r"gather_single: 4 elements, .* for 3 ranks of 5"):
        group.gather_single(torch.zeros(4), values(rank, 5), opts)


def wrong_lists(rank: int) -> list[str]:
    """Only the root has them; all ranks go on."""
    x, said = torch.ones(3), []
    for call in (
        lambda: dist.gather(x, [torch.zeros(3)] if rank == 0 else None),
        lambda: dist.gather(x, [torch.zeros(3), torch.zeros(4)] if rank == 0 else None),
        lambda: dist.scatter(x, [torch.zeros(3)] * 3 if rank == 0 else None),
        lambda: dist.scatter(x, [torch.zeros(3), torch.zeros(4)] if rank == 0 else None),
        lambda: dist.scatter(x, [torch.zeros(2), torch.zeros(4)] if rank == 0 else None),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    strided = torch.zeros(4, 2)[:, 0]  # into which gloo writes wrongly
    dist.scatter(strided, [values(r, 4) for r in range(2)] if rank == 1 else None, 1)
    assert strided.equal(values(rank, 4))
    dist.all_reduce(y := torch.ones(1))
    return [*said, str(y.item())]


@pytest.mark.parametrize("machines", [(), (0, 0, 1)])
@in_group(3, "machines")
def test_an_all_gather_of_unequal_tensors(rank: int) -> None:
    shapes = [(r % 2 + 1, 3 - r) for r in range(3)]
    every = [torch.zeros(shape) for shape in shapes]
    dist.all_gather(every, torch.full(shapes[rank], rank + 1.0))
    assert [x.flatten().tolist() for x in every] == [[1.0] * 3, [2.0] * 4, [3.0]]


@in_group(2)
def test_a_wrong_size_on_one_rank_is_told_to_all(rank: int) -> None:
    x, larger = torch.empty(2), torch.empty(2 + (rank == 1))
    for call in (
        lambda: dist.all_to_all_single(larger, x),
        lambda: dist.all_to_all_single(x, larger),
        lambda: dist.all_gather_single(larger, torch.empty(1)),
        lambda: dist.all_gather_single(torch.empty(2 + 2 * rank), torch.empty(1)),
        lambda: dist.reduce_scatter_single(torch.empty(1), larger),
        lambda: dist.reduce_scatter_single(torch.empty(1), torch.empty(2 + 2 * rank)),
    ):
        with pytest.raises(CollectiveError):
            call()
    with pytest.raises(ValueError, match=r"allreduce: avg is not defined for torch\.int32"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
    dist.all_reduce(x := torch.ones(1))
    assert x == 2


@in_group(3)
def test_a_rank_that_comes_late_to_a_barrier_learns_that_others_have_left(rank: int) -> None:
    group: Any = dist.group.WORLD
    hurry(group.communicator, 0.5)
    while rank == 1 and not group.communicator.calls.control.aborted():
        time.sleep(0.01)
    with pytest.raises(CollectiveError):
        dist.barrier()


def test_wrong_lists_of_a_root_keep_nobody_waiting() -> None:
    root, other = run(2, wrong_lists)
    assert root[0] == "ValueError: gather: 1 tensors for 2 ranks"
    assert root[1] == "ValueError: gather: 4 elements where 3 are needed"
    assert all(said.startswith("CollectiveError") for said in (*root[2:5], *other[:-1]))
    assert len(root) == 6 and len(other) == 4 and root[-1] == other[-1] == "2.0"


def of_each_device(rank: int) -> tuple[str, bool]:
    group: Any = dist.group.WORLD
    calls = group.communicator.calls.control.number
    dist.all_reduce(x := torch.ones(3))
    assert x[0] == 2
    return dist.get_backend(), group.communicator.calls.control.number == calls


def test_another_backend_for_the_cpu() -> None:
    found = run(2, of_each_device, backend="cpu:gloo,cuda:linkweave")
    assert found == [("cpu:gloo,cuda:linkweave", True)] * 2
    assert run(2, of_each_device, backend="cpu:linkweave") == [("cpu:linkweave", False)] * 2
    assert run(2, both, backend="cpu:gloo,cuda:linkweave") == [True] * 2


@in_group(2)
def test_calls_in_compiled_functions(rank: int) -> None:
    """They end a graph, and nothing of theirs is compiled; so is a whole step of DDP."""
    torch.manual_seed(3)
    net = torch.nn.Linear(6, 3)
    plain = copy.deepcopy(net)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    mine, alone = (torch.optim.SGD(one.parameters(), 0.1) for one in (ddp, plain))

    @torch.compile(backend="eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        mine.zero_grad()
        ddp(x).square().mean().backward()
        mine.step()

    for n in (10, 10, 33):
        assert call(torch.ones(n)).tolist() == [4] * n
    for _ in range(4):
        x = torch.randn(4, 6)
        step(x[rank::2])
        alone.zero_grad()
        plain(x).square().mean().backward()
        alone.step()
    torch.testing.assert_close([*net.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("machines", [(), (2, 1)])
@in_group(3, "machines")
def test_ddp_trains(rank: int) -> None:
    """Plain DDP: the ranks' parameters stay equal, to the bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 10) + rank).square().sum().backward()
        optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(x, mine) for x in every)


@pytest.mark.parametrize(("backend", "own"), [("linkweave", "group"), ("gloo", "communicator")])
@in_group(3, "backend")
def test_hooks(rank: int, own: str) -> None:
    """The largest relative errors of gradients after DDP with each hook."""
    from linkweave.collectives.distributed import allreduce_hook, bf16_hook, fp16_hook

    found, size = [], dist.get_world_size()
    for hook in (allreduce_hook, fp16_hook, bf16_hook):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Linear(300, 3))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        ddp.register_comm_hook(linkweave.init() if own == "communicator" else None, hook)
        data = torch.stack([torch.randn(4, 10) + r for r in range(size)])
        for _ in range(2):  # DDP makes new buckets after the first step
            ddp.zero_grad()
            ddp(data[rank]).square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        (sum(model(x).square().sum() for x in data) / size).backward()
        exact = torch.cat([p.grad.flatten() for p in model.parameters()])
        error = (gradients - exact).abs().max() / exact.abs().max()
        every = [torch.zeros_like(gradients) for _ in range(size)]
        dist.all_gather(every, gradients)
        assert all(torch.equal(x, gradients) for x in every)
        found.append(error.item())
    exact, fp16, bf16 = found
    assert exact < 1e-6 < fp16 < 2e-3 < bf16 < 2e-2


@pytest.mark.parametrize("machines", [(), (2, 1)])
@in_group(3, "machines")
def test_a_callback_may_wait_for_a_collective_of_its_group(rank: int) -> None:
    """Collectives whose futures' callbacks wait for later ones of the same group."""

    def summed(more: int) -> Any:
        x = torch.ones(2)
        future = dist.all_reduce(x, async_op=True).get_future()
        if not more:
            return future
        return future.then(lambda done: done.value()[0] + summed(more - 1).wait()[0])

    assert summed(3).wait().tolist() == [12.0, 12.0]


KEPT: list[Any] = []


def powered(rank: int, backend: str) -> list[float]:
    """Parameters after DDP with PowerSGD's hook, whose callbacks wait for collectives."""
    KEPT.append(dist.group.WORLD)  # gloo's thread would join itself if it let go of it last
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(4, 10) + rank).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_powersgd_trains_as_over_gloo() -> None:
    mine, gloo = (run(2, powered, name, backend=name) for name in ("linkweave", "gloo"))
    assert mine[0] == mine[1] == pytest.approx(gloo[0], rel=1e-4, abs=1e-5)


@in_group(3)
def test_groups_of_some_ranks(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    dist.all_reduce(x := torch.ones(1), group=group)
    dist.destroy_process_group(group)
    assert x == 2


@pytest.mark.parametrize("machines", [(), pytest.param((2, 2), marks=pytest.mark.slow)])
@in_group(4, "machines")
def test_functional_collectives_on_a_mesh(rank: int) -> None:
    """Functional collectives over the rows, the columns and all of a mesh of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    assert (mesh.get_local_rank("row"), mesh.get_local_rank("column")) == divmod(rank, 2)
    for group in (mesh.get_group("row"), mesh.get_group("column"), dist.group.WORLD):
        assert dist.get_backend(group) == "linkweave"
        ranks = dist.get_process_group_ranks(group)
        me, size = ranks.index(rank), len(ranks)
        all_x = [torch.arange(12) + 100 * r for r in ranks]
        x, total, to_me = all_x[me], sum(all_x), slice(me * (me + 1) // 2, (me + 1) * (me + 2) // 2)
        short = x[: size * (size + 1) // 2]  # j + 1 elements for rank j
        pairs = [
            (funcol.all_reduce(x, "sum", group), total),
            (funcol.all_reduce(x, "max", group), all_x[-1]),
            (funcol.broadcast(x, size - 1, group), all_x[-1]),
            (funcol.all_gather_tensor(x.view(3, 4), 0, group), torch.cat(all_x).view(-1, 4)),
            (funcol.all_gather_tensor(x.view(3, 4), 1, group),
             torch.cat([y.view(3, 4) for y in all_x], 1)),
            (funcol.reduce_scatter_tensor(x, "sum", 0, group), total.chunk(size)[me]),
            (funcol.reduce_scatter_tensor(x.view(3, 4), "sum", 1, group),
             total.view(3, 4).chunk(size, 1)[me]),
            (funcol.all_to_all_single(x, None, None, group),
             torch.cat([y.chunk(size)[me] for y in all_x])),
            (funcol.all_to_all_single(short, [me + 1] * size, [j + 1 for j in range(size)], group),
             torch.cat([y[to_me] for y in all_x])),
        ]  # fmt: skip
        coalesced = (
            (funcol.all_reduce_coalesced([x, x[:5]], "sum", group), (total, total[:5])),
            (funcol.all_gather_into_tensor_coalesced([x, x[:5]], group),
             (torch.cat(all_x), torch.cat([y[:5] for y in all_x]))),
            (funcol.reduce_scatter_tensor_coalesced([x, x[:8]], "sum", [0, 0], group),
             (total.chunk(size)[me], total[:8].chunk(size)[me])),
        )  # fmt: skip
        pairs += [pair for both in coalesced for pair in zip(*both, strict=True)]
        for at, (found, wanted) in enumerate(pairs):
            assert torch.equal(funcol.wait_tensor(found), wanted), (ranks, at)


def lose(rank: int, what: str) -> str:
    dist.all_reduce(torch.ones(3))
    if rank == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.broadcast(torch.ones(3), 0)
    else:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        try:
            work.wait()
        finally:
            assert isinstance(work.exception(), CollectiveError) and not work.is_success()
    return "nothing was noticed"


@pytest.mark.parametrize(
    ("what", "words"), [("killed", r"rank 1 \(process \d+\) died"), ("other", "differ")]
)
def test_a_rank_that_is_lost_is_named(what: str, words: str) -> None:
    start = time.monotonic()
    found = run(3, lose, what)
    assert time.monotonic() - start < 100  # of 200
    for rank in (0, 2):
        assert re.search(words, found[rank]), found


def test_whoever_waits_finds_the_result_in_place() -> None:
    """Also while another thread moves it there."""
    moving, go, moved, seen = threading.Event(), threading.Event(), [], []

    def finish() -> None:
        moving.set()
        go.wait(100)
        moved.append(True)

    over: Any = SimpleNamespace(wait=lambda timeout=None: None, done=lambda: True)
    work = GroupWork(over, [], finish)
    first = threading.Thread(target=work.wait)
    first.start()
    assert moving.wait(100)
    others = [
        threading.Thread(target=lambda ask=ask: (ask(), seen.append(bool(moved))))
        for ask in (work.wait, work.is_completed)
    ]
    for thread in others:
        thread.start()
    others[0].join(0.05)
    go.set()
    for thread in (first, *others):
        thread.join(100)
    assert seen == [True, True] and moved == [True]


def test_what_moves_the_result_may_raise_and_is_asked_again() -> None:
    """An error that a poll has met is not lost."""

    def finish() -> None:
        raise ValueError("gather: 1 tensors for 2 ranks")

    over: Any = SimpleNamespace(wait=lambda timeout=None: None, done=lambda: True)
    work = GroupWork(over, [], finish)
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), ValueError)
    for _ in range(2):
        with pytest.raises(ValueError, match="1 tensors for 2 ranks"):
            work.wait()


TOLD = multiprocessing.get_context("fork").Event()


@in_group(2)
def test_timeouts_of_single_calls(rank: int) -> None:
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60))
    with pytest.warns(UserWarning, match=r"own calls keep the timeout .* 0:00:50 from now on"):
        group.set_timeout(timedelta(seconds=50))
    dist.barrier(timeout=timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"not done after 0\.05 s"):
            dist.barrier(timeout=timedelta(seconds=0.05))
        TOLD.set()
    else:
        TOLD.wait(60)
        dist.barrier()  # the call goes on where it is late
    dist.all_reduce(x := torch.ones(1))
    assert x == 2


def test_an_old_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    words = "the backend linkweave needs torch 2.13 or later, .* than those of 2.9.1"
    with pytest.raises(CollectiveError, match=words):
        dist.init_process_group("linkweave", store=dist.HashStore(), rank=0, world_size=1)


def test_the_installed_package_registers_itself() -> None:
    """By the entry point that `import torch` loads."""
    code = "import torch.distributed as d; print(hasattr(d.Backend, 'LINKWEAVE'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
