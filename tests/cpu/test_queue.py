"""Gradient queues: layers of an all-reduce are used before all of it is done."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import failure, on_gpus, queues, tensor
from host_gpu import CURRENT, HostDevice, needs_compiler
from on_ranks import on_ranks
from typer.testing import CliRunner

from linkweave import collectives
from linkweave.bench.command.cli import app
from linkweave.collectives import CollectiveError, get_default, plan_allreduce
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce
from linkweave.collectives.runtime.cpu import executor as shm
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu import launch_tables
from linkweave.collectives.runtime.gpu.executor import virtual_ranks
from linkweave.topology import Topology, load

LAYERS = [1, 0, 4999, 70_000, 25_000]
SIZE = sum(LAYERS)


def inputs(rank: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rank).integers(-9, 10, SIZE).astype(dtype)


@pytest.mark.parametrize(
    ("size", "topology", "algorithm"),
    [*((size, "auto", "auto") for size in (1, 2, 3, 8)),
     *((8, "dgx1-v100", name)
       for name in ("overlapped_double_tree", "double_tree", "ring", "one_shot"))],
)  # fmt: skip
@on_ranks(params=["topology"])
def test_each_layer_is_final_when_it_is_dequeued(rank: int, algorithm: str) -> None:
    comm = get_default()
    wanted = sum(inputs(r) for r in range(comm.size))
    stops = np.cumsum([0, *LAYERS])
    for call in range(3):
        x = inputs(rank)
        queue = comm.allreduce_queue(x, LAYERS, algorithm=algorithm)
        order = range(len(LAYERS)) if call else reversed(range(len(LAYERS)))
        for layer in order:
            queue.dequeue(layer)
            part = slice(stops[layer], stops[layer + 1])
            assert np.array_equal(x[part], wanted[part]), (call, layer)
        queue.wait()
        assert queue.done() and np.array_equal(x, wanted)
        queue.dequeue(0)


def _star(topology: Topology) -> Algorithm:
    """Rank 0 combines a chunk and sends it to all, then the next chunk."""
    size = len(topology.gpus)
    others = tuple(range(1, size))
    rounds = (Reduce(others, 0, 0, 0),), (Copy(0, others, 0, 0),)
    return Algorithm("star", size, 1, (rounds,))


@on_ranks(4)
def test_layer_1_computes_before_the_last_chunk_has_arrived(rank: int) -> None:
    """Rank 0 holds the last chunk back until all ranks have computed on the first layer."""
    comm = get_default()
    beside = comm.split()
    x = np.full(1 << 18, rank + 1, np.float32)
    end = x.ctypes.data + x.nbytes
    computed = threading.Event()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5, ctypes.c_double)

    def combine(dst: int, table: int, m: int, ahead: int, n: int, divisor: float) -> None:
        if dst + 4 * n == end:
            assert computed.wait(20)
        own = np.ctypeslib.as_array(ctypes.cast(dst, ctypes.POINTER(ctypes.c_float)), (n,))
        for address in (ctypes.c_int64 * m).from_address(table):
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            own += np.ctypeslib.as_array(pointer, (n,))

    function = kind(combine)
    shm.combine_address = lambda dtype, op: ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[assignment]
    queue = comm.allreduce_queue(x, [1 << 12, (1 << 18) - (1 << 12)], algorithm=_star)
    queue.dequeue(0)
    found = float(np.tanh(x[: 1 << 12]).sum())
    assert not queue.done()
    beside.barrier()
    computed.set()
    queue.wait()
    assert (x == sum(range(1, comm.size + 1))).all()
    assert found == float(np.tanh(np.full(1 << 12, 10, np.float32)).sum())


@on_ranks(2)
def test_bad_input_is_refused_by_name_on_every_rank(rank: int) -> None:
    comm = get_default()
    x = np.zeros(10, np.float32)
    queue = comm.allreduce_queue(x, [4, 6])
    words = [str(failure(lambda at=at: queue.dequeue(at))) for at in (2, -1, 0.5, True)]
    queue.wait()
    for tensor_, layers in (
        (x, [4, 5]), (x, [11, -1]), (x, [4.0, 6.0]), (x, 10.0), (np.zeros((4, 6))[:, ::2], [12])
    ):  # fmt: skip
        queue = comm.allreduce_queue(tensor_, layers)
        words.append(str(failure(lambda queue=queue: queue.dequeue(0))))
        assert words[-1] == str(failure(queue.wait))
    comm.allreduce(x)  # all may go on
    for at, text in enumerate(("2", "-1", "0.5", "True")):
        assert words[at] == f"layer must be an integer from 0 to 1, not {text}"
    assert words[4] == "layers of 9 elements for a tensor of 10: they must agree"
    count = "the number of elements of a layer must be an integer of at least 0, not"
    assert words[5:8] == [f"{count} -1", f"{count} 4.0", f"{count} 10.0"]
    assert words[8] == "a gradient queue needs a contiguous tensor"


@on_ranks(2)
def test_ranks_with_other_layers_are_told(rank: int) -> None:
    queue = get_default().allreduce_queue(np.zeros(10, np.float32), [4, 6] if rank else [5, 5])
    words = str(failure(lambda: queue.dequeue(0)))
    assert "calls differ: " in words


def _peer_dies(rank: int) -> str:
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    queue = get_default().allreduce_queue(np.zeros(1 << 20, np.float32), [1 << 19, 1 << 19])
    start = time.monotonic()
    error = failure(lambda: queue.dequeue(0))
    assert time.monotonic() - start < 100 and error is not None
    raise error


def test_who_waits_for_a_layer_is_told_that_a_peer_died() -> None:
    with pytest.raises(CollectiveError, match=r"rank 1"):
        collectives.spawn(_peer_dies, 3, timeout=200)


# ---- on GPUs ------------------------------------------------------------------------------------
@needs_compiler
@queues
@pytest.mark.parametrize("algorithm", ["auto", "overlapped_double_tree"])
@on_gpus(3, "threads on one GPU", "processes on one GPU")
def test_on_a_gpu_streams_wait_for_layers(rank: int, algorithm: str) -> None:
    comm = get_default()
    wanted = sum(inputs(r) for r in range(comm.size))
    stops = np.cumsum([0, *LAYERS])
    device = _device()
    for _ in range(2):
        x = tensor(inputs(rank), stream=7 + rank)
        queue: Any = comm.allreduce_queue(x, LAYERS, algorithm=algorithm)
        for layer in range(len(LAYERS)):
            queue.dequeue(layer)
            device.synchronise(7 + rank)
            part = slice(stops[layer], stops[layer + 1])
            assert np.array_equal(x.array[part], wanted[part]), layer
        queue.wait()
        device.synchronise(7 + rank)
        assert np.array_equal(x.array, wanted)
    assert "from 0 to 4, not 5" in str(failure(lambda: queue.dequeue(5)))
    comm.synchronize()


def _device() -> HostDevice:
    device = cuda.open_device(CURRENT.index)
    assert isinstance(device, HostDevice)
    return device


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_a_dequeue_is_an_event_and_a_check_on_the_callers_stream(rank: int) -> None:
    comm = get_default()
    x = tensor(inputs(rank), stream=7)
    queue = comm.allreduce_queue(x, LAYERS)
    _device().done.clear()
    queue.dequeue(2)
    found = [f"{what} {stream}" for what, _, stream in _device().done]
    queue.wait()
    comm.synchronize()
    assert found == ["wait 7", "check 7", "record 7"]


@needs_compiler
@queues
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@on_gpus(3, "threads on one GPU", "processes on one GPU")
def test_two_queues_at_once(rank: int, order: tuple[int, ...]) -> None:
    """Queues of two sizes of one plan: each counts for itself."""
    comm = get_default()
    device, sizes = _device(), (300_000, 20_000)
    given = [np.full(n, rank + 1, np.float32) for n in sizes]
    for _ in range(3):
        tensors = [tensor(x, stream=7 + rank) for x in given]
        queues = [
            comm.allreduce_queue(x, [1000, n - 1000], algorithm="overlapped_double_tree")
            for x, n in zip(tensors, sizes, strict=True)
        ]
        for at in order:
            for layer in (0, 1):
                queues[at].dequeue(layer)
                device.synchronise(7 + rank)
                part = slice(0, 1000) if layer == 0 else slice(1000, None)
                assert (tensors[at].array[part] == 6).all(), (at, layer)
        for queue in queues:
            queue.wait()
    comm.synchronize()


@needs_compiler
def test_a_layer_passes_before_the_last_chunk() -> None:
    """Sends take a second; the first layer is there, and its check over, long before."""
    device = HostDevice()
    nbytes, layers = 1 << 20, [1 << 14, (1 << 20) - (1 << 14)]
    plan = plan_allreduce(load("mesh-3"), nbytes, "overlapped_double_tree", 32)
    with virtual_ranks(device, 3) as ranks:
        prepared = ranks.prepare(plan, nbytes, "float32", "sum", layers=layers)
        buffers = [device.upload(np.full(nbytes // 4, r, np.float32)) for r in range(3)]
        begun = {rank: device.make_event() for rank in range(3)}
        end = device.make_event()
        counted = ranks.run(prepared, buffers, 0, 10**12 // nbytes, begun)
        assert counted is not None
        device.record(end, 0)
        device.wait(begun[1], 5)
        ranks.dequeue(prepared, counted, 1, 0, 5)
        device.synchronise(5)
        first = np.ctypeslib.as_array((ctypes.c_float * (1 << 12)).from_address(buffers[1]))
        assert (first == 3).all() and not device.ready(end)
        ranks.dequeue(prepared, counted, 1, 1, 5)
        device.synchronise(5)
        whole = np.ctypeslib.as_array((ctypes.c_float * (nbytes // 4)).from_address(buffers[1]))
        assert (whole == 3).all()
        ranks.check()
        for address in buffers:
            device.free(address)
    device.close()
    assert not device.memory


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_a_refused_queue_leaves_no_event(rank: int) -> None:
    comm, device = get_default(), _device()
    x = tensor(inputs(rank), stream=7)
    comm.allreduce_queue(x, LAYERS).wait()
    comm.synchronize()
    comm.allreduce(x)  # which gives back what the queue had
    comm.synchronize()
    before = len(device._events)
    for layers in ([4, 5], [SIZE + 1, -1]):
        assert failure(lambda layers=layers: comm.allreduce_queue(x, layers)) is not None
    device.captured |= {7: 1, comm._gpu._side: 1}  # type: ignore[union-attr,dict-item]
    new = tensor(np.zeros(SIZE + 1), stream=7)
    assert "cannot be captured" in str(failure(lambda: comm.allreduce_queue(new, [SIZE + 1])))
    device.captured.clear()
    assert len(device._events) == before


@needs_compiler
@pytest.mark.parametrize("aborted", [0, 1])
def test_a_check_ends_with_its_deadline_or_when_all_stop(aborted: int) -> None:
    device = HostDevice()
    counters, need, stop, abort = (np.zeros(4, np.uint32) for _ in range(4))
    need[:], abort[0] = 1, aborted
    check = np.zeros(1, launch_tables.CHECK)
    arrays = {"counters": counters, "need": need, "stop": stop, "abort": abort}
    for name, array in arrays.items():
        check[name] = array.ctypes.data
    check["timeout_ns"], check["tracks"], check["width"] = 5e7, 2, 2
    start = time.monotonic()
    device.check(check, 0)
    device.synchronise(0)
    assert abort[0] == stop[0] == 1 and 0.05 * (1 - aborted) <= time.monotonic() - start < 30
    device.close()


def test_the_benchmark_prints_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "queue.json"
    words = f"bench queue -n 2 -s 256K -l 5 -r 1 --out {out}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["auto", "overlapped_double_tree", "double_tree"]
    assert all(0 < row["first_ms"] <= row["last_ms"] <= row["all_ms"] for row in rows)
    assert all(row["algorithm"] in done.output for row in rows)
