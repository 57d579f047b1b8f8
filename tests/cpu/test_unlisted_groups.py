"""Lanes over a process group: torch.distributed does not list their groups."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import run

from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed import unlisted
from linkweave.collectives.distributed.hooks import _communicator
from linkweave.collectives.distributed.unlisted import Unlisted, kinds_of
from linkweave.collectives.training.transport import OverGroup, transport_of


def averaged(group: Any) -> float:
    transport = OverGroup(group)
    transport.open(2)
    transport.average(1, x := torch.full((3,), float(transport.rank)))
    assert transport.share(b"x" * transport.rank) == [b"x" * r for r in range(transport.size)]
    transport.close()
    return float(x[0])


def seen(rank: int, which: str) -> list[float]:
    """Ranks that have seen other groups than the rest."""
    if which == "a group of some ranks":
        dist.new_group([0, 1])
        return [averaged(dist.group.WORLD)]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = [averaged(halves[0])] if rank < 2 else []
    if which == "lanes of some ranks, then a group":
        dist.all_reduce(x := torch.ones(1), group=dist.new_group([0, 1, 2, 3]))
        return [*found, float(x)]
    return [*found, averaged(dist.group.WORLD), averaged(dist.group.WORLD)]


@pytest.mark.parametrize(
    ("which", "found"),
    [("a group of some ranks", [1.5]), ("lanes of some ranks", [1.5, 1.5]),
     ("lanes of some ranks, then a group", [4.0])],
)  # fmt: skip
def test_ranks_may_have_seen_other_groups(which: str, found: list[float]) -> None:
    """torch's own groups of some ranks are named by how many others a process has seen."""
    some = [] if which == "a group of some ranks" else [0.5]
    ranks = run(4, lambda rank: seen(rank, which), backend="gloo")
    assert ranks == [[*some, *found]] * 2 + [found] * 2


class Nccl:
    """Writes down its calls; synchronous ones return nothing."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self._said.append(name)
            return SimpleNamespace(wait=lambda: None) if name == "_end_coalescing" else None

        return call


def over_nccl(rank: int) -> list[str]:
    """Over a group of NCCL alone, which torch's CPU build lacks."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unlisted, "nccl_group", lambda *_: Nccl(said))
        made = Unlisted(dist.group.WORLD, {"cpu", "cuda"})
    made.broadcast(x := torch.full((2,), float(rank)), 1)  # as Adam's count of steps
    assert x.tolist() == [1, 1] and not said
    gpu: Any = SimpleNamespace(is_cuda=True, device="cuda:1")
    made.broadcast(gpu, 0)
    made.sendrecv(gpu, 1, gpu, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", said.append)
        assert made._nccl is not None
        if rank == 0:  # the other one closes last
            made.close()
            made.close()
            made._nccl.join(0.3)
            assert said[-1] == "cuda:1"
        dist.barrier()
        made.close()
        made._nccl.join(60)
    return said


def test_tensors_go_to_the_group_of_their_device() -> None:
    calls = ["broadcast", "_start_coalescing", "send", "recv", "_end_coalescing"]
    assert run(2, over_nccl, backend="gloo") == [[*calls, "cuda:1", "abort"]] * 2


def test_nccls_group_ends_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(unlisted, "nccl_group", lambda *_: Nccl(said))
    monkeypatch.setattr(unlisted, "timeout_of", lambda group: dist.default_pg_timeout)
    for name in ("_get_process_group_store", "get_process_group_ranks"):
        monkeypatch.setattr(dist.distributed_c10d, name, lambda group: dist.HashStore())
        monkeypatch.setattr(dist, name, lambda group: [0], raising=False)
    group: Any = dist.ProcessGroup(0, 1)
    monkeypatch.setattr(dist.ProcessGroup, "group_name", "mine", raising=False)
    ended, aborted = Unlisted(group, {"cuda"}), Unlisted(group, {"cuda"})
    aborted.abort()
    assert said == ["abort"]
    del group
    gc.collect()
    assert ended._nccl and aborted._nccl
    ended._nccl.join(60)
    aborted._nccl.join(60)
    assert said == ["abort"] * 2


@pytest.mark.parametrize("failed", [False, True])
def test_a_program_ends_nccls_groups_at_its_end(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits a while for ranks that go on, and not at all if it has failed."""
    said: list[str] = []
    waits = unlisted._Nccl(Nccl(said), store := dist.HashStore(), 2)
    monkeypatch.setattr(unlisted, "_OPEN", {waits})
    monkeypatch.setattr(unlisted, "_PATIENCE", 0.2)
    monkeypatch.setattr(sys, "last_value", ValueError() if failed else None, raising=False)
    unlisted._at_exit()
    assert said == ["abort"] and store.num_keys() == (0 if failed else 1)
    waits.close()
    waits.abort()
    assert said == ["abort"]


def test_another_backend_is_refused() -> None:
    backend = SimpleNamespace(name=lambda: "mpi")
    wrapped = SimpleNamespace(wrapped_pg=backend)
    for each in (backend, wrapped):
        group = SimpleNamespace(
            _device_types=[torch.device("cpu")], _get_backend=lambda device, each=each: each
        )
        with pytest.raises(CollectiveError, match=r"on cpu by mpi; training needs gloo, NCCL or"):
            kinds_of(group)


def closed_in_any_order(rank: int) -> list[float]:
    kept = [OverGroup(dist.group.WORLD) for _ in range(2)]
    for transport in kept:
        transport.open(2)
    for transport in kept if rank else kept[::-1]:
        transport.close()
    found = [averaged(dist.group.WORLD)]
    last = OverGroup(dist.group.WORLD)
    if rank == 0:
        last.close()  # alone
    return [*found, averaged(dist.group.WORLD)]


def test_ranks_close_in_any_order() -> None:
    assert run(3, closed_in_any_order, backend="gloo") == [[1.0, 1.0]] * 3


def again_on_one_store(rank: int) -> list[float]:
    """A process group that ends, and another one, whose addresses lie where the first has left
    its own."""
    store, found = dist.distributed_c10d._get_default_store(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
        for _ in range(3):
            found.append(averaged(dist.new_group(backend="gloo")))
    return found


def test_a_store_is_used_again() -> None:
    assert run(2, again_on_one_store, backend="gloo") == [[0.5] * 3] * 2


FORKS = """
import atexit, os, sys, torch, torch.distributed as dist, linkweave
rank, store = sys.argv[1:]
dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trains = linkweave.DataParallel(model, optimizer, schedule="c-cube")
for _ in range(24):
    optimizer.zero_grad()
    trains(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if (child := os.fork()) == 0:
    atexit._run_exitfuncs()  # with a step under way; what torch itself has is left alone
    os._exit(0)
print(os.waitpid(child, 0)[1])
trains.close()
dist.destroy_process_group()
"""


def test_a_forked_child_has_no_lanes_to_end(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FORKS]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store")], text=True, stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2], start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [rank.communicate(timeout=100)[0].strip() for rank in ranks] == ["0", "0"]
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


def states(rank: int) -> list[str]:
    part = dist.new_group([0])
    said = []
    for call in (lambda: _communicator(dist.group.WORLD), lambda: transport_of(part, "cpu")):
        try:
            call()
            said.append("fine")
        except CollectiveError as error:
            said.append(str(error))
    return said


def test_groups_that_cannot_be_used_are_named() -> None:
    first, second = run(2, states, backend="gloo")
    state = 'must be a communicator, a process group of backend "linkweave", which'
    assert state in first[0] and state in second[0]
    assert first[1] == "fine" and "is not in the process group that it passes" in second[1]


def dropped(rank: int) -> list[Any]:
    """Whether a transport that nobody has closed ends, and what one of a destroyed group says."""
    transport = OverGroup(part := dist.new_group())
    transport.open(2)
    left = [weakref.ref(over) for over in (*transport._lanes, transport._own)]
    last = OverGroup(part)
    del transport
    gc.collect()
    found: list[Any] = [each() for each in left]
    dist.destroy_process_group(part)
    with pytest.raises(CollectiveError, match="the process group has been destroyed"):
        last.open(1)
    return found


def test_a_transport_that_is_dropped_ends() -> None:
    assert run(2, dropped, backend="gloo") == [[None] * 3] * 2
