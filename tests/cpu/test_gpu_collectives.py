"""`collectives.allreduce` and the others on GPU tensors, on GPUs made of threads: ranks that are
threads or processes, on one GPU or one each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, failure, gpus, on_gpus, queues, tensor
from host_gpu import HostDevice, HostTensor, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.kernels import dtypes
from linkweave.topology import load

pytestmark = needs_compiler

DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool")


def values(rank: int, n: int, dtype: str = "float32") -> np.ndarray:
    """Small integers, whose sums are exact in every dtype."""
    return ((np.arange(n) * 7 + rank * 3) % 5).astype(dtype)


def close(machine: Machine) -> list[object]:
    """End this process's communicator; what it leaves behind."""
    get_default().close()
    return machine.left()


def every_collective(rank: int, n: int, machine: Machine, forked: bool) -> list[object]:
    comm = get_default()
    size = comm.size
    given = [values(r, n) for r in range(size)]
    total = np.sum(given, axis=0, dtype=np.float32)

    x = tensor(given[rank])
    assert comm.allreduce(x) is None
    y = tensor(given[rank])
    comm.broadcast(y, root=size - 1)
    z = tensor(given[rank])
    comm.reduce(z, root=size // 2)
    every = tensor(np.zeros((size, n)))
    assert comm.allgather(tensor(given[rank]), out=every) is every
    rows = np.stack([np.arange(size) * 10 + r for r in range(size)])  # what each rank sends
    swapped = tensor(np.zeros(size))
    comm.alltoall(tensor(rows[rank]), swapped)
    whole = tensor(np.stack([given[rank]] * size))
    part = tensor(np.zeros((1, n)))
    comm.reduce_scatter(whole, out=part)
    several = [tensor(given[rank]), tensor(given[rank][: n // 2])]
    comm.allreduce(several, op="max")
    work = comm.allreduce(w := tensor(given[rank]), op="avg", async_op=True)
    assert work is not None and work.wait(60) is None and work.done()
    unchanged, apart, rooted = tensor(given[rank]), tensor([0.0] * n), tensor([0.0] * n)
    assert comm.allreduce(unchanged, out=apart) is apart
    root = size // 2
    assert comm.reduce(unchanged, root=root, out=rooted) is (rooted if rank == root else None)
    both = [tensor(given[rank]), tensor([0.0] * n)]
    comm.allreduce(both[:1], op="max", out=both[1:])
    comm.synchronize()

    assert unchanged.array.tolist() == given[rank].tolist()
    assert apart.array.tolist() == total.tolist()
    assert rooted.array.tolist() == (total.tolist() if rank == root else [0.0] * n)
    assert both[0].array.tolist() == given[rank].tolist()
    assert both[1].array.tolist() == np.max(given, axis=0).tolist()
    assert x.array.tolist() == total.tolist()
    assert y.array.tolist() == given[-1].tolist()
    assert z.array.tolist() == (total if rank == size // 2 else given[rank]).tolist()
    assert every.array.tolist() == [g.tolist() for g in given]
    assert swapped.array.tolist() == rows[:, rank].tolist()
    assert part.array.tolist() == [total.tolist()]
    assert whole.array[0].tolist() == given[rank].tolist()
    highest = np.max(given, axis=0)
    assert several[0].array.tolist() == highest.tolist()
    assert several[1].array.tolist() == highest[: n // 2].tolist()
    assert w.array.tobytes() == (total / np.float32(size)).tobytes()
    return close(machine) if forked else []


@pytest.mark.parametrize(
    ("mode", "size", "machine"),
    [*(("threads on one GPU", size, False) for size in (1, 2, 5)),
     *((mode, 3, one_queue) for mode in MODES for one_queue in (False, True))],
    indirect=["machine"],
)  # fmt: skip
def test_every_collective(mode: str, size: int, machine: Machine) -> None:
    forked = "virtual" not in MODES[mode]
    arguments = (1009, machine, forked)
    found = collectives.spawn(every_collective, size, f"mesh-{size}", arguments, **MODES[mode])
    assert found == [[]] * size


@on_gpus(3, "threads on one GPU", "a process a GPU")
def test_every_dtype_in_both_protocols(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for n in (0, 1, 331, 30_011):
            x = tensor(values(rank, n, dtype), dtype)
            collectives.allreduce(x)
            get_default().synchronize()
            want = np.sum([values(r, n, dtype) for r in range(size)], axis=0, dtype=dtype)
            assert x.array.tolist() == want.tolist(), (dtype, n)
    for op in ("sum", "or", "max", "prod", "and", "min", "xor"):
        for true in range(size + 1):  # on so many ranks
            want = true > 0 if op in ("sum", "or", "max") else true == size
            want = bool(true % 2) if op == "xor" else want
            x = tensor([rank < true] * 2, "bool")
            collectives.allreduce(x, op)
            get_default().synchronize()
            assert x.array.tolist() == [want] * 2, (op, true)
    for op, step in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        for dtype in ("int8", "uint8", "int32", "int64"):
            x = tensor(values(rank, 331, dtype), dtype)
            collectives.allreduce(x, op)
            get_default().synchronize()
            want = step.reduce([values(r, 331, dtype) for r in range(size)])
            assert x.array.tolist() == want.tolist(), (op, dtype)


def same_bits(rank: int, algorithm: str) -> tuple[bytes, bytes]:
    given = np.random.default_rng(rank).standard_normal(30_011).astype(np.float32)
    comm = get_default()
    comm.allreduce(x := given.copy(), algorithm=algorithm)
    comm.allreduce(y := tensor(given), algorithm=algorithm)
    comm.synchronize()
    return x.tobytes(), y.array.tobytes()


@pytest.mark.parametrize("algorithm", ["overlapped_double_tree", "ccube_dgx1", "tree", "one_shot"])
def test_the_same_bits_as_on_the_cpu(algorithm: str, machine: Machine) -> None:
    found = collectives.spawn(same_bits, 8, "dgx1-v100", (algorithm,), **MODES["a process a GPU"])
    assert len({bits for pair in found for bits in pair}) == 1


@queues
@on_gpus(2)
def test_calls_on_several_streams_come_one_after_another(rank: int) -> None:
    """Each call doubles what the one before has left, averages but for every fourth."""
    comm = get_default()
    x = tensor([1.0] * 100)
    for i in range(12):
        comm.allreduce(HostTensor(x.array, x.device.id, stream=(0, 5, 7)[i % 3]), op="sum")
        if i % 4 == 3:
            comm.allreduce(x, op="avg", async_op=True)
    comm.synchronize()
    assert x.array[:2].tolist() == [4096.0] * 2


def what_is_said(call: Any) -> str:
    return str(failure(call) or "no error")


@on_gpus(2, "processes on one GPU")
def test_a_call_is_waited_for_on_its_side_of_a_capture(rank: int, machine: Machine) -> None:
    comm, device = get_default(), machine.ours()[0]
    x = tensor([1.0] * 5, stream=9)
    comm.allreduce(x)
    comm.allreduce(x, async_op=True).wait()
    before = comm.allreduce(x, async_op=True)
    device.captured[9] = 1
    said = [what_is_said(before.wait)]
    within = comm.allreduce(x, async_op=True)
    said.append(what_is_said(within.wait))
    device.captured.clear()
    said.append(what_is_said(within.wait))
    assert said == [
        "wait for this call before the capture begins",
        "no error",
        "a captured call can only be waited for within the same capture",
    ]
    before.wait()
    comm.allreduce(x)
    comm.synchronize()


@on_gpus(2, "processes on one GPU")
def test_what_needs_the_other_ranks_is_not_captured(rank: int, machine: Machine) -> None:
    comm = get_default()
    device = machine.ours()[0]
    known, unknown = tensor([1.0] * 5), tensor([1.0] * 7)
    comm.allreduce(known)
    device.captured[9] = 1
    for x in (known, unknown):
        x.stream = 9
    every = HostTensor(np.zeros((2, 5), np.float32), 0, 9)
    said = [
        what_is_said(lambda: comm.allreduce(known)),
        what_is_said(lambda: comm.allreduce(unknown)),
        what_is_said(lambda: comm.allgather(known, out=every)),
        what_is_said(lambda: comm.reduce_scatter(every, out=tensor([0.0] * 5, stream=9))),
    ]
    device.synchronise(9)
    device.captured.clear()
    assert said[0] == "no error"
    assert said[1] == (
        "this call is the first allreduce(7 x float32, sum, auto) on the GPU, which all "
        "ranks agree on, and cannot be captured into a graph: make it once before"
    )
    assert "is the first allgather(10 x float32 in all) on the GPU" in said[2]
    assert "of shape (1, 5)" in said[3]


class OnGpu(HostTensor):
    """Numbers on the GPU that can be read as integers, as torch's can."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())


def by_tensors(comm: Any, rank: int, size: int) -> None:
    """Splits and counts in the same tensors, whose values change."""
    x, got = tensor(np.full((2, 1), rank)), tensor(np.zeros((2 * size, 1)))
    splits, counts = (OnGpu(np.zeros(size, np.int64), x.device.id) for _ in range(2))
    for to in (0, 1, 0):
        splits.array[:] = counts.array[:] = 0
        splits.array[to], counts.array[to] = 2, 2
        out = got if rank == to else got[:0]
        comm.alltoall(x, out, splits)
        mine = x if rank == to else x[:0]
        whole = tensor(np.full((2, 1), -1.0))
        comm.allgather(mine, counts=counts, out=whole)
        comm.synchronize()
        assert out.array.reshape(-1).tolist() == (np.repeat(range(size), 2) if rank == to else
                                                  np.zeros(0)).tolist()  # fmt: skip
        assert whole.array.reshape(-1).tolist() == [to, to]


@on_gpus(3)
def test_uneven_rows(rank: int, size: int) -> None:
    """Rows of 3, of which ranks give and get different numbers, some none."""
    comm = get_default()
    for salt in range(4):
        counts = [(3 * r + salt) % 4 for r in range(size)]
        mine = tensor(np.full((counts[rank], 3), rank), "int32")
        whole = tensor(np.full((sum(counts), 3), -1), "int32")
        comm.allgather(mine, counts=counts, out=whole)
        splits = [[(s + 2 * d + salt) % 5 for d in range(size)] for s in range(size)]
        comes = [split[rank] for split in splits]
        given = [np.full((n, 3), 10 * rank + d) for d, n in enumerate(splits[rank])]
        got = tensor(np.full((sum(comes), 3), -1), "int32")
        x = tensor(np.concatenate(given), "int32")
        work = comm.alltoall(x, got, splits[rank], comes if salt % 2 else None, async_op=salt == 3)
        if work is not got:
            work.wait()
        comm.synchronize()
        assert whole.array[:, 0].tolist() == np.repeat(range(size), counts).tolist()
        want = np.repeat([10 * s + rank for s in range(size)], comes)
        assert got.array.tolist() == [[n] * 3 for n in want.tolist()]
    x, got = tensor([[1], [2]]), tensor([[0.0]] * 2)
    by_tensors(comm, rank, size)
    wrong, few = [2] + [0] * (size - 1), tensor(np.zeros((0 if rank else 2 * size, 1)))
    said = [
        what_is_said(lambda: comm.alltoall(x, got, [1] * size)),
        what_is_said(lambda: comm.alltoall(x, few, wrong, wrong if rank else None)),
        what_is_said(lambda: comm.alltoall(x, tensor([[0.0]] * (9 - rank)), wrong)),
    ]
    comm.allreduce(x)
    comm.synchronize()
    assert x.array.tolist() == [[size], [2 * size]]
    assert "in_splits adds up to 3 rows, for a tensor of shape (2, 1)" in said[0]
    assert said[1] == (
        "out_splits of rank 1 says [2, 0, 0] rows come, by rank; the ranks send [0, 0, 0]"
    )
    assert said[2] == "out of rank 0 has room for 9 rows; 6 come, by rank [2, 2, 2]"


@on_gpus(3)
def test_first_calls_that_differ_raise_everywhere_and_move_nothing(rank: int) -> None:
    comm = get_default()
    said = what_is_said(lambda: comm.allreduce(tensor([1.0] * (4 + rank // 2))))
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    after = x.array.tolist()
    assert "ranks [0, 1]: allreduce(4 x float32, sum, auto) on the GPU" in said
    assert "ranks [2]: allreduce(5 x float32, sum, auto) on the GPU" in said
    assert after == [3.0] * 4


@on_gpus(3, "threads on one GPU")
def test_threads_notice_known_calls_that_differ(rank: int) -> None:
    comm = get_default()
    for n in (4, 5):
        comm.allreduce(tensor([1.0] * n))
    said = what_is_said(lambda: comm.allreduce(tensor([1.0] * (4 + rank // 2))))
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    after = x.array.tolist()
    assert said == (
        "the ranks' calls on the GPU differ: ranks [0, 1]: allreduce(4 x float32, sum, "
        "auto) on the GPU; ranks [2]: allreduce(5 x float32, sum, auto) on the GPU"
    )
    assert after == [3.0] * 4


@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_bad_input_is_refused_and_leaves_the_ranks_in_step(rank: int) -> None:
    comm = get_default()
    x = tensor([1.0] * 4)
    frozen = tensor([1.0] * 4)
    frozen.array.flags.writeable = False
    said = [
        what_is_said(lambda: comm.allreduce([x, np.ones(4, np.float32)])),
        what_is_said(lambda: comm.allreduce(tensor([1j], "complex64"))),
        what_is_said(lambda: comm.allreduce(frozen)),
        what_is_said(lambda: comm.allreduce(HostTensor(np.ones(8, np.float32)[::2]))),
        what_is_said(lambda: comm.allreduce(x, op="mean")),
        what_is_said(lambda: comm.allgather(x)),
        what_is_said(lambda: comm.allgather(x, out=np.ones((2, 4), np.float32))),
        what_is_said(lambda: comm.alltoall(tensor([1.0] * 5))),
        what_is_said(lambda: comm.allreduce(HostTensor(np.ones(4, np.float32), device=3))),
        what_is_said(lambda: comm.allreduce(x, op="or")),
    ]
    comm.allreduce(x)
    comm.synchronize()
    assert x.array.tolist() == [2.0] * 4
    assert said == [
        "this call runs on GPU 0; the tensor is on the CPU",
        f"unsupported dtype complex64; choose from {', '.join(dtypes.DTYPES)}",
        "the array is read-only; a collective writes its result into it",
        "a contiguous array is needed, not one of strides (8,)",
        "unknown op 'mean'; choose from sum, avg, min, max, prod, and, or, xor",
        "out is needed for results of type HostTensor",
        "this call runs on GPU 0; the tensor is on the CPU",
        "alltoall splits rows over 2 ranks: the first dimension must be a multiple of that, "
        "not of shape (5,)",
        f"rank {rank} runs on GPU 0; the tensor is on GPU 3",
        "or is not defined for float32; choose from sum, avg, min, max, prod",
    ]


@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_calls_on_the_cpu_and_on_the_gpu_keep_their_order(rank: int) -> None:
    """Calls on the CPU under way when the first one on the GPU brings the ranks together."""
    comm = get_default()
    cpu = np.full(300_000, 1, np.float32)
    works = [comm.allreduce(cpu, async_op=True) for _ in range(3)]
    comm.allreduce(x := tensor([1.0] * 4))
    comm.barrier()
    comm.allreduce(cpu)
    for work in works:
        assert work is not None
        work.wait()
    comm.synchronize()
    assert [*x.array[:1].tolist(), float(cpu[0]), float(cpu[-1])] == [2.0, 16.0, 16.0]


def with_a_cap(rank: int, machine: Machine) -> tuple[str, list[int]]:
    comm = get_default()
    said = what_is_said(lambda: comm.allreduce(tensor([1.0] * 40_000), algorithm="double_tree"))
    comm.allreduce(x := tensor([1.0] * 40_000), algorithm="tree")
    comm.synchronize()
    assert x.array.tolist() == [3.0] * 40_000
    return said, [blocks for _, blocks in machine.ours()[0].launches]


def test_a_cap_on_blocks_holds_for_every_rank(machine: Machine) -> None:
    found = collectives.spawn(with_a_cap, 3, "mesh-3", (machine,), device="cuda", max_blocks=3)
    assert all("has no room for" in said or "max_blocks is 3" in said for said, _ in found)
    assert any("double_tree needs 4 thread blocks for rank" in said for said, _ in found)
    assert all(max(blocks) <= 3 for _, blocks in found)


def what_is_taken(rank: int) -> set[str]:
    comm: Any = get_default()
    comm.allreduce(x := tensor(values(rank, 250_000)))
    comm.broadcast(x)
    comm.synchronize()
    assert x.array.tolist() == np.sum([values(r, 250_000) for r in range(8)], axis=0).tolist()
    return {call.plan.algorithm for *_, call in comm._gpu._known.values()}


def test_auto_takes_what_the_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest on a DGX-1, with a GPU a rank, takes 255 blocks."""
    plan = collectives.plan_allreduce(load("dgx1-v100"), 1_000_000)
    assert (plan.algorithm, len(plan.tracks)) == ("packed_trees", 255)
    with gpus(monkeypatch, lambda index: HostDevice(33)):
        found = collectives.spawn(
            what_is_taken, 8, "dgx1-v100", device="cuda:0", virtual=True, timeout=60
        )
    assert len({frozenset(taken) for taken in found}) == 1
    assert "packed_trees" not in found[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'; choose from cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "unknown device 'cuda:x'"),
        ({"device": "cuda:\N{SUPERSCRIPT TWO}"}, "unknown device"),
        ({"virtual": True}, "virtual ranks share a GPU: say device='cuda:0'"),
        ({"max_blocks": 0}, "max_blocks must be an integer of at least 1, not 0"),
        ({"max_blocks": True}, "max_blocks must be an integer of at least 1, not True"),
        ({"peer_access": "no"}, "unknown peer_access 'no'; choose from prefer, require"),
    ],
)
def test_settings_that_are_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CollectiveError, match=words.replace("(", r"\(")):
        collectives.spawn(print, 2, **arguments)


def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(CollectiveError, match=r"^(GPU tensors need CuPy|GPU 0 cannot be used)"):
        collectives.spawn(print, 2, device="cuda:0")
    with pytest.raises(CollectiveError, match=r"^(GPU tensors need CuPy|GPU 0 cannot be used)"):
        collectives.spawn(print, 2, device="cuda", virtual=True)


def raises(rank: int) -> None:
    x = tensor([1.0])
    collectives.allreduce(x)
    if rank == 1:
        raise KeyError("of rank 1")
    collectives.allreduce(x)
    get_default().synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_the_rank_that_fails_is_the_one_that_is_raised(
    mode: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(KeyError, match=r"of rank 1") as caught:
        collectives.spawn(raises, 3, "mesh-3", **MODES[mode])
    assert caught.value.__notes__[0].startswith("rank 1:\n")


@on_gpus(3, timeout=100)
def test_messages_along_pairs(rank: int) -> None:
    comm = get_default()
    for pairs in ([(0, 2)], [(1, 0)], [(2, 1)]):
        x = tensor(values(rank, 300, "int32"), "int32")
        comm.sendrecv(x, pairs)
        comm.synchronize()
        ((source, target),) = pairs
        assert (x.array == values(source if rank == target else rank, 300, "int32")).all()


@pytest.mark.parametrize("counts", [[[3, 0, 5], [1, 2, 3], [0, 0, 0]], [[0] * 3] * 3])
@on_gpus(3, "threads on one GPU", "a process a GPU", timeout=100)
def test_rows_of_which_all_ranks_know_the_counts(rank: int, counts: list[list[int]]) -> None:
    comm = get_default()
    given = np.concatenate([np.full(n, 10 * rank + to) for to, n in enumerate(counts[rank])])
    x = tensor(given, "int32")
    got = tensor(np.zeros(sum(row[rank] for row in counts)), "int32")
    comm.exchange(x, counts, got)
    comm.synchronize()
    want = np.concatenate([np.full(row[rank], 10 * r + rank) for r, row in enumerate(counts)])
    assert (got.array == want).all()
