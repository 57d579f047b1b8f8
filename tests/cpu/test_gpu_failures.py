"""Ranks on GPUs that die, come late, cannot reach each other or see different machines."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Choosy, Machine, Numbered, failure, gpus, on_gpus, tensor
from host_gpu import HostTensor, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.calls import gpu as calls_gpu
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu import control
from linkweave.collectives.runtime.gpu import memory
from linkweave.topology import GpuId, Topology, TopologyError, load
from tests.cpu.helpers import hurry

pytestmark = needs_compiler
PROCESSES = ("processes on one GPU", "a process a GPU")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """What all ranks log, those that are forked as well."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("linkweave").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("linkweave").removeHandler(handler)


def killed(rank: int, path: str) -> None:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 10))
    comm.synchronize()
    if rank == 2:
        Path(path, "when").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(x)
    error = failure(comm.synchronize)
    Path(path, f"{rank}").write_text(f"{time.monotonic()}|{type(error).__name__}|{error}")
    assert error is not None
    raise error


@pytest.mark.parametrize("mode", PROCESSES)
def test_a_killed_rank_frees_the_gpus_of_the_others(
    mode: str, machine: Machine, tmp_path: Path, patient: None
) -> None:
    with pytest.raises(CollectiveError, match=r"rank 2 \(process \d+\) was killed by SIGKILL"):
        collectives.spawn(killed, 4, "mesh-4", (str(tmp_path),), timeout=200, **MODES[mode])
    died = float((tmp_path / "when").read_text())
    for rank in (0, 1, 3):
        when, kind, text = (tmp_path / f"{rank}").read_text().split("|", 2)
        assert float(when) - died < 100, text
        assert kind == "CollectiveAborted"
        assert re.match(r"rank 2 \(process \d+\) (died|raised an exception); rank \d waits", text)


def late(rank: int, nbytes: int, failed: Any) -> tuple[str, str, list[int | None]]:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * (nbytes // 4)), algorithm="chain")
    comm.synchronize()
    hurry(comm, 1)
    if rank != 2:
        comm.allreduce(x, algorithm="chain")
    else:
        for _ in range(2):
            assert failed.acquire(timeout=60)
    error = failure(lambda: [comm.allreduce(x, algorithm="chain"), comm.synchronize()])
    failed.release()
    fields = [getattr(error, name, None) for name in ("rank", "peer", "channel", "step", "chunk")]
    return type(error).__name__, str(error), fields


@pytest.mark.parametrize(
    ("mode", "nbytes"), [*zip(PROCESSES, (400, 400_000), strict=True)], ids=["lines", "slots"]
)
def test_the_error_says_who_waits_for_whom_and_what_that_did(
    mode: str, nbytes: int, machine: Machine
) -> None:
    arguments = nbytes, get_context("fork").Semaphore(0)
    found = collectives.spawn(late, 3, "mesh-3", arguments, timeout=60, **MODES[mode])
    kinds = [kind for kind, *_ in found]
    assert "CollectiveTimeout" in kinds and set(kinds) <= {"CollectiveTimeout", "CollectiveAborted"}
    asked = rf"allreduce\({nbytes // 4} x float32, sum, chain\) on the GPU"
    late_ones = [(text, fields) for kind, text, fields in found if kind == "CollectiveTimeout"]
    for text, fields in late_ones:
        assert re.match(
            r"rank (0|1) waits for (the data|a free slot) of chunk \d+ on channel \d \(step \d+\) "
            r"from rank \d for 1 s", text
        ), text  # fmt: skip
        assert all(isinstance(f, int) for f in fields)
    # its neighbour's word on rank 2, and rank 2's own
    told = " ".join(text for text, _ in late_ones)
    own = rf"rank 2 last: 1 calls on the GPU, the last {asked}; nothing"
    assert re.search(rf"{own}|rank 1 last: [23] calls", told), told
    assert re.match(r"rank (0|1) gave up waiting for rank \d; ", found[2][1])


def late_thread(rank: int, failed: threading.Semaphore) -> str:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    hurry(comm, 1)
    if rank == 1:
        for _ in range(2):
            assert failed.acquire(timeout=60)
    said = str(failure(lambda: comm.allreduce(x)))
    failed.release()
    return said


def test_threads_say_which_one_is_missing(machine: Machine) -> None:
    found = collectives.spawn(
        late_thread, 3, "mesh-3", (threading.Semaphore(0),), timeout=60,
        **MODES["threads on one GPU"],
    )  # fmt: skip
    words = r"rank [02] waits for rank 1 to make its allreduce\(4 x float32, sum, auto\) on"
    assert any(re.match(words, text) for text in found), found
    assert all("rank 1" in text for text in found)


@on_gpus(2, "a process a GPU", topology="auto")
def test_communicators_are_made_again_after_a_failure(
    rank: int, tmp_path: Path, machine: Machine
) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{tmp_path}/store", 2), rank=rank, world_size=2
    )
    made = []
    for attempt in range(3):
        comm = collectives.init("mesh-2", timeout=60)
        comm.allreduce(x := tensor([float(attempt)] * 4))
        comm.synchronize()
        made.append(float(x.array[0]))
        if attempt < 2:  # a failure on the GPU, in the middle of a call
            hurry(comm, 1)
            if rank == attempt:
                comm.allreduce(x)
                assert isinstance(failure(comm.synchronize), CollectiveTimeout)
                dist.barrier()
            else:
                dist.barrier()
                assert isinstance(failure(lambda c=comm, y=x: c.allreduce(y)), CollectiveAborted)
            said = str(failure(lambda c=comm, y=x: c.allreduce(y)))
            assert said.startswith("this communicator failed before (Collective")
        comm.close()
        comm.close()
        dist.barrier()
        assert not machine.left()
    assert made == [0.0, 2.0, 4.0]


class Walled(Choosy):
    """GPU 0 and GPU 1 cannot open each other's memory; host memory may be out of reach too."""

    def __init__(self, index: int, host: bool = True) -> None:
        super().__init__(index)
        self.host = host

    def sees(self, peer: int) -> bool:
        return {self.index, peer} != {0, 1}

    def register(self, address: int, nbytes: int) -> None:
        if not self.host:
            raise RuntimeError("this GPU does not see host memory at the host's addresses")
        super().register(address, nbytes)


def behind_walls(rank: int, machine: Machine) -> tuple[list[float], int, list[object]]:
    comm = get_default()
    for n in (4, 40_000):
        for _ in range(3):
            comm.allreduce(x := tensor(np.arange(n) % 7))
    comm.synchronize()
    registered = len(machine.ours()[0].registered)
    comm.close()
    return (x.array[:8].tolist(), registered, machine.left())


def test_gpus_without_peer_access_go_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    with gpus(monkeypatch, Walled) as machine:
        found = collectives.spawn(behind_walls, 3, "mesh-3", (machine,), device="cuda")
    for rank, (values, registered, left) in enumerate(found):
        assert values == [0, 3, 6, 9, 12, 15, 18, 0]
        # rank 0's and rank 1's memory, lines and slots; rank 2 reaches both by IPC
        assert registered == 2 * 2 * (rank < 2), rank
        assert not left
    said = log.read_text()
    assert said.count("it is in host memory, which is slow") == 1
    assert "rank 0 cannot open that of ranks [1]; rank 1 cannot open that of ranks [0]" in said
    assert "cudaErrorMapBufferObjectFailed" in said


def walled_and_refused(rank: int) -> str:
    return str(failure(lambda: get_default().allreduce(tensor([1.0] * 4))))


@pytest.mark.parametrize("host", [True, False], ids=["refused by the user", "no host memory"])
def test_no_way_between_two_gpus_is_an_error_on_every_rank(
    host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, partial(Walled, host=host)):
        found = collectives.spawn(
            walled_and_refused, 3, "mesh-3", device="cuda",
            peer_access="require" if host else "prefer",
        )  # fmt: skip
    words = "peer_access='require' forbids host memory" if host else "nor can the GPUs use host"
    assert any(words in said for said in found)
    for said in found:
        assert words in said or "raised an exception" in said, said
    assert any("GPU memory of other processes: rank 0 cannot open" in said for said in found)


# ---- which machine ---------------------------------------------------------------------------
def seen(order: tuple[int, ...] = (2, 0, 1)) -> Topology:
    """Rank r's GPU, by its bus id, is number order[r] of a DGX-1."""
    machine = load("dgx1-v100")
    devices = tuple(GpuId(g, f"0000:0{r}:00.0") for r, g in enumerate(order))
    return Topology(machine.name, machine.gpus, machine.links, devices=devices)


def on_the_map(rank: int, differs: int) -> list[Any]:
    if rank == differs:
        memory.detect = lambda environ: load("mesh-8")  # type: ignore[assignment]
    comm: Any = get_default()
    error = failure(lambda: comm.allreduce(tensor([1.0])))
    comm.synchronize()
    return [str(error), None if error else comm._gpu.planner.topology.gpus]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect", lambda environ: seen())


def test_ranks_have_the_numbers_of_the_detected_graph(told: None, machine: Machine) -> None:
    found = collectives.spawn(on_the_map, 3, args=(-1,), device="cuda")
    assert found == [["None", (2, 0, 1)]] * 3


def test_ranks_that_see_different_machines_are_named(told: None, machine: Machine) -> None:
    for said, _ in collectives.spawn(on_the_map, 3, args=(1,), device="cuda"):
        assert re.match(r"the ranks see different machines: ranks \[0, 2\]: \w{8}; ranks \[1\]: "
                        r"00000000; pass topology=", said)  # fmt: skip


def test_ranks_have_the_numbers_of_a_map_that_names_gpus(machine: Machine) -> None:
    assert (
        collectives.spawn(on_the_map, 3, seen(), (-1,), device="cuda") == [["None", (2, 0, 1)]] * 3
    )
    part = seen((5, 3))
    for said, _ in collectives.spawn(on_the_map, 3, part, (-1,), device="cuda"):
        assert said.startswith(
            "rank 2's GPU is not part of the topology: dgx1-v100 has no GPU GPU-0000:02:"
        )


def test_a_map_of_another_machine_is_taken_as_it_is(machine: Machine) -> None:
    devices = tuple(GpuId(g, f"0000:f{g}:00.0") for g in range(8))
    plain = load("dgx1-v100")
    other = Topology(plain.name, plain.gpus, plain.links, devices=devices)
    for spec in (other, "dgx1-v100"):
        found = collectives.spawn(on_the_map, 3, spec, (-1,), device="cuda")
        assert found == [["None", (0, 1, 2)]] * 3


def test_a_gpu_that_is_not_on_the_map_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    monkeypatch.setattr(memory, "detect", lambda environ: seen((2, 0)))
    for said, _ in collectives.spawn(on_the_map, 3, args=(-1,), device="cuda"):
        assert said.startswith(
            "rank 2's GPU is not part of the topology: dgx1-v100 has no GPU GPU-0000:02:"
        )


def test_with_a_driver_that_does_not_answer_ranks_plan_on_a_mesh_and_are_told(
    monkeypatch: pytest.MonkeyPatch, told: None, machine: Machine, log: Path
) -> None:
    def broken(environ: object) -> Topology:
        raise TopologyError("the GPU driver does not answer: lost")

    monkeypatch.setattr(memory, "detect", broken)
    found = collectives.spawn(on_the_map, 2, args=(-1,), device="cuda")
    assert found == [["None", (0, 1)]] * 2
    words = "rank 0 cannot ask for the GPUs' links: the GPU driver does not answer: lost; assuming"
    assert log.read_text().count(words) == log.read_text().count("links") == 1


def test_ranks_that_share_a_gpu_plan_on_a_mesh_and_are_told(
    told: None, machine: Machine, log: Path
) -> None:
    found = collectives.spawn(on_the_map, 2, args=(-1,), device="cuda:0")
    assert found == [["None", (0, 1)]] * 2
    assert log.read_text().count("ranks [0, 1] run on one GPU (0000:00:00.0, ") == 1


@pytest.mark.parametrize(("timeout", "found"), [(None, [30, 600, 600, 600]), (99.0, [99] * 4)])
@on_gpus(2, "processes on one GPU", "threads on one GPU", params=["timeout"])
def test_ranks_with_gpus_wait_longer_unless_told(rank: int, found: list[float]) -> None:
    comm = get_default()
    told = [comm.timeout]
    comm.allreduce(tensor([1.0]))
    told += [comm.timeout, comm._gpu.team.gpu.timeout]  # type: ignore[union-attr]
    assert [*told, comm.split(0).timeout] == found


def late_and_told(rank: int, log: Path) -> list[float]:
    """Rank 1 makes its second call once rank 0 has told of its wait."""
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    comm.barrier()
    while rank == 1 and "has waited for" not in log.read_text():
        time.sleep(0.01)
    comm.allreduce(x)
    comm.synchronize()
    return x.array.tolist()


def test_a_long_wait_is_told_of_before_it_ends(
    machine: Machine, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENT", 0.2)
    found = collectives.spawn(late_and_told, 2, "mesh-2", (log,), **MODES["processes on one GPU"])
    assert found == [[4.0] * 4] * 2
    assert log.read_text().count("rank 0 has waited for 0.2 s: rank 0 waits for") == 1


def absent(rank: int, log: Path) -> None:
    """Rank 1 makes its call once rank 0 has told of its wait on the host."""
    comm = get_default()
    comm.barrier()
    while rank == 1 and "so far" not in log.read_text():
        time.sleep(0.01)
    control.PATIENT = 0.2
    comm.barrier()
    control.PATIENT = 30.0


def test_a_long_wait_on_the_host_is_told_of(log: Path) -> None:
    collectives.spawn(absent, 2, "mesh-2", (log,), timeout=70)
    told = log.read_text()
    assert told.count("so far") == 1 and "rank 0 waits for rank 1 to make its call" in told


def most_blocks(rank: int, machine: Machine) -> tuple[float, float]:
    """The share of its GPU that a long call takes, of all ranks and of a part, which is alone."""
    comm, device = get_default(), machine.ours()[0]
    holds = device.resident("float32", "sum")
    comm.allreduce(tensor([1.0] * 1_000_000))
    comm.synchronize()
    return max(n for _, n in device.launches) / holds, comm.split(0).settings.sharing


def test_processes_that_share_a_gpu_fit_on_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, lambda index: Numbered(index, multiprocessors=5)) as machine:
        run = partial(collectives.spawn, most_blocks, 2, "mesh-2", (machine,), max_blocks=1000)
        alone, shared = run(device="cuda"), run(device="cuda:0")
    assert min(blocks for blocks, _ in alone) > 0.5
    assert 0.25 < sum(blocks for blocks, _ in shared) <= 1
    assert [sharing for _, sharing in (*alone, *shared)] == [1, 1, 2, 2]


def test_a_machine_without_a_map_is_a_mesh(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, log: Path
) -> None:
    monkeypatch.setattr(memory, "detect", lambda environ: load("cpu-4"))
    assert collectives.spawn(on_the_map, 3, args=(-1,), device="cuda") == [["None", (0, 1, 2)]] * 3
    assert log.read_text().count("assuming a mesh") == 1


class Apart(Numbered):
    """GPU 1 reaches GPU 0, but not the other way round."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.large: list[int] = []

    def enable_peer_access(self, peer: int) -> bool:
        return self.index != 0 or peer != 1

    def allocate(self, nbytes: int) -> int:
        self.large += [nbytes] * (nbytes > 1 << 20)
        return super().allocate(nbytes)


def threads_apart(rank: int, machine: Machine) -> list[Any]:
    comm: Any = get_default()
    for n in (4, 400_003):
        x = comm.symmetric_empty(n, device="cuda")
        x[:] = tensor(np.arange(n) % 7)
        comm.allreduce(x, algorithm="chain")
        comm.synchronize()
        assert (x.array == np.arange(n) % 7 * 3).all()
    part = comm.split()
    part.allreduce(y := tensor([1.0]))
    part.synchronize()
    slots = [n for d in machine.ours() for n in d.large if n not in (1_600_012,)]
    return [y.array.tolist(), len(slots), [p.direct for p in comm._gpu.team._prepared.values()]]


def test_gpus_of_one_process_without_peer_access_go_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    with gpus(monkeypatch, Apart) as machine:
        found = collectives.spawn(threads_apart, 3, "mesh-3", (machine,), **MODES["a thread a GPU"])
    assert found == [[[3.0], 3, [False, False]]] * 3
    said = log.read_text()
    assert said.count("GPU 0 has no access to GPU 1's; it is in host memory") == 1


def test_gpus_of_one_process_without_peer_access_are_refused_where_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        gpus(monkeypatch, Apart),
        pytest.raises(CollectiveError, match=r"GPU 0 has no access to GPU 1's; peer_access='requ"),
    ):
        collectives.spawn(killed, 2, "mesh-2", (".",), peer_access="require",
                          **MODES["a thread a GPU"])  # fmt: skip


class Alone(Numbered):
    def enable_peer_access(self, peer: int) -> bool:
        return False


@on_gpus(2, "a thread a GPU", make=Alone, peer_access="require")
def test_parts_of_threads_are_refused_host_memory_too(rank: int) -> None:
    comm = get_default()
    for part in (comm.split(), *comm.lanes(1)):
        error = failure(lambda part=part: [part.allreduce(tensor([1.0])), part.synchronize()])
        assert "peer_access='require' forbids host memory" in str(error)


@on_gpus(2, "a process a GPU", timeout=100)
def test_what_has_failed_is_not_waited_for(rank: int, machine: Machine) -> None:
    """Rank 0's launch is stuck behind another one's kernel until the test ends."""
    comm, stuck = get_default(), threading.Event()
    calls_gpu.STUCK = 0.5
    comm.allreduce(x := tensor([1.0], stream=5))
    comm.synchronize()
    hurry(comm, 1)
    if rank == 0:
        machine(0)._enqueue(5, lambda: stuck.wait(100))
    comm.allreduce(x)
    start = time.monotonic()
    error = failure(comm.synchronize)
    stuck.set()
    assert isinstance(error, (CollectiveTimeout, CollectiveAborted)), error
    assert time.monotonic() - start < 60


@on_gpus(2, "processes on one GPU", timeout=60)
def test_a_rank_that_closes_early_keeps_nobody_for_ever(rank: int) -> None:
    comm = get_default()
    comm.allreduce(x := tensor([1.0]))
    comm.synchronize()
    hurry(comm, 1)
    if rank == 0:
        comm.close()
        return
    time.sleep(0.5)
    error = failure(lambda: [comm.allreduce(HostTensor(x.array)), comm.synchronize()])
    assert "rank 0" in str(error)
