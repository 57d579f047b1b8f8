"""What users call: every dtype and op, every kind of bad input, several ways to start."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import types
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave import collectives, kernels
from linkweave.collectives import CollectiveError, DataParallel
from linkweave.collectives.calls import communicator
from linkweave.collectives.calls.communicator import Communicator, get_default
from linkweave.collectives.calls.methods import Methods
from linkweave.collectives.planning import collective
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.kernels.dtypes import OPS, ops_of
from tests.cpu.helpers import TORCH_DTYPES, error_of

ROOT = Path(__file__).parents[2]
FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
             "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


@on_ranks(1, 2, 3, 5)
def test_every_dtype_and_op(rank: int) -> None:
    comm = get_default()
    size = comm.size
    for dtype in TORCH_DTYPES:
        name = str(dtype).removeprefix("torch.")
        for op in OPS.keys() - ops_of(name):
            said = error_of(comm.allreduce, torch.ones(2, dtype=dtype), op)
            assert said == f"{op} is not defined for {name}; choose from {', '.join(ops_of(name))}"
        if not dtype.is_floating_point:
            continue
        for op, want in {
            "sum": sum(range(1, size + 1)),
            "max": size,
            "min": 1,
            "prod": int(np.prod(range(1, size + 1))),
            "avg": (size + 1) / 2,
        }.items():
            for count in (0, 1, 257):
                x = torch.full((count,), rank + 1, dtype=dtype)
                comm.allreduce(x, op)
                assert (x == torch.tensor(want).to(dtype)).all(), (dtype, op, count)
    for dtype in ("int8", "uint8", "int32", "int64", "bool"):
        for count in (0, 1, 257, 40_003):
            parts = [anything(r, count, dtype) for r in range(size)]
            for op in ops_of(dtype):
                x = parts[rank].copy()
                comm.allreduce(torch.from_numpy(x) if count == 257 else x, op)
                want = FUNCTIONS[op].reduce(parts, dtype=dtype)
                assert x.tobytes() == want.tobytes(), (dtype, op, count)


def anything(rank: int, count: int, dtype: str) -> np.ndarray:
    """Any integers, of which sums wrap; of a bool True in two of three places."""
    rng = np.random.default_rng([rank, count])
    if dtype == "bool":
        return rng.integers(0, 3, count) > 0
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, count, dtype, endpoint=True)


@on_ranks(3)
def test_8_bit_floats(rank: int) -> None:
    """Values that each step holds exactly."""
    comm = get_default()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = torch.full((100_003,), rank + 1.0).to(dtype)
        for op, want in {"sum": 6, "avg": 2, "min": 1, "max": 3, "prod": 6}.items():
            for shared in (False, True):
                x = comm.empty(mine.shape, dtype) if shared else mine.clone()
                x.copy_(mine)
                comm.allreduce(x, op)
                assert (x.float() == want).all(), (dtype, op, shared)
        large = torch.full((1000,), torch.finfo(dtype).max).to(dtype)
        comm.allreduce(large, "avg", algorithm="ring")  # partial sums are too large
        assert not large.float().isfinite().any()
        assert comm.allgather(mine[:5]).float()[:, 0].tolist() == [1, 2, 3]
        assert comm.reduce_scatter(mine[:6]).float().tolist() == [6, 6]
        comm.broadcast(mine, 1)
        assert (mine.float() == 2).all()


@on_ranks(1, 2, 7)
def test_shapes_lists_order_and_broadcast(rank: int) -> None:
    comm = get_default()
    total = sum(range(comm.size))
    grid = torch.full((40, 30), float(rank))
    comm.allreduce(grid.t())
    assert (grid == total).all()
    wide = np.full((50, 6), rank, np.int32)
    comm.allreduce(wide[::2, 1:4])
    assert (wide[::2, 1:4] == total).all() and (wide[1::2] == rank).all()
    scalar = torch.tensor(float(rank))
    comm.allreduce(scalar)
    assert scalar == total
    parts = [torch.full((n,), float(rank)) for n in (3, 0, 1000, 1)]
    comm.allreduce(parts)
    assert all((p == total).all() for p in parts)
    works = [comm.allreduce(np.full(n, rank, np.float64), async_op=True) for n in (5, 50_000)]
    late = np.full(9, rank, np.float64)
    comm.leave_cores()
    comm.allreduce(late)
    assert all(w.done() for w in works) and (late == total).all()
    for root in range(comm.size):
        for x in (np.full(100_003, rank, np.int64), comm.empty(70_001, torch.bfloat16)):
            x[:] = rank
            comm.broadcast(x, root)
            assert (x == root).all()
    comm.barrier()


@on_ranks(1, 2, 3)
def test_results_that_go_elsewhere(rank: int) -> None:
    """Results that go elsewhere: the inputs stay."""
    comm = get_default()
    total, root = sum(range(comm.size)), comm.size - 1
    for n in (0, 1, 1009, 200_003):
        for make in (
            lambda v, n=n: np.full(n, v, np.float32),
            lambda v, n=n: torch.full((n,), float(v)),
            lambda v, n=n: comm.empty(n, torch.float32).fill_(v),
            lambda v, n=n: torch.full((2 * n,), float(v))[::2],
        ):
            x, out = make(rank), make(-1)
            assert comm.allreduce(x, out=out) is out
            assert (x == rank).all() and (out == total).all()
            assert comm.reduce(x, "max", root, out=out) is (out if rank == root else None)
            assert (x == rank).all() and (out == (root if rank == root else total)).all()
    shared = comm.empty(500)
    shared[:] = rank
    fixed = np.full(500, rank, np.float32)
    fixed.flags.writeable = False
    assert comm.allreduce(fixed, out=shared, async_op=True).wait(60) is shared
    assert (shared == total).all() and (fixed == rank).all()
    assert collectives.allreduce(shared, "min", out=shared) is shared
    assert (shared == total).all()
    parts = [torch.full((n,), float(rank)) for n in (3, 0, 1000)]
    outs = [torch.zeros(n) for n in (3, 0, 1000)]
    assert comm.allreduce(parts, out=outs) is outs
    assert all((p == rank).all() for p in parts) and all((p == total).all() for p in outs)
    for bad, words in (
        (np.zeros(499, np.float32), "out must be of shape (500,) and float32, not (499,)"),
        (np.zeros(500), "and float64"),
        (torch.zeros(500), "out must be a NumPy array"),
        (fixed, "read-only"),
    ):
        assert words in error_of(comm.allreduce, np.zeros(500, np.float32), out=bad)
    row = np.zeros(600, np.float32)
    assert "out overlaps the input" in error_of(comm.allreduce, row[:500], out=row[100:])
    for bad in (outs[:2], outs[0]):
        assert "out must be a list of 3 tensors" in error_of(comm.allreduce, parts, out=bad)


@on_ranks(2)
def test_shared_memory_is_given_back(rank: int) -> None:
    comm = get_default()
    first = comm.offset_of(comm.empty(1000))
    for dtype in ("int8", np.float16, torch.float16, torch.bfloat16):
        x = comm.empty((3, 5), dtype)
        assert tuple(x.shape) == (3, 5) and comm.offset_of(x) == first  # freed and used again
        del x
    view = comm.empty(10)[2:4]
    assert comm.offset_of(view) == first + 8 and comm.offset_of(np.ones(3)) == -1
    del view
    for bad in (-1, 2.5, "x", (2, -3)):
        assert "a shape is made of integers >= 0" in error_of(comm.empty, bad)
    assert "unsupported dtype complex64" in error_of(comm.empty, 3, np.complex64)


@on_ranks(2)
def test_shared_memory_stays_while_any_view_of_it_lives(rank: int) -> None:
    comm = get_default()
    made = [comm.empty(n, dtype) for n in (100, 0, 7) for dtype in ("int64", torch.int64)]
    made += [comm.empty((8, 8), dtype)[2:3] for dtype in ("int64", torch.int64)]  # only a view
    for i, x in enumerate(made):
        x[:] = i
    gc.collect()
    comm.empty(500, "int64")[:] = -1  # takes none of the places that are still looked at
    for i, x in enumerate(made):
        assert (x == i).all(), (i, x)
    spans = sorted((comm.offset_of(x), x.nbytes) for x in made if x.nbytes)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))


@on_ranks(3)
def test_bad_input_is_refused_and_leaves_the_ranks_in_step(rank: int) -> None:
    comm = get_default()
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False
    for words, call in {
        "unknown op 'mean'; choose from sum, avg, min, max, prod": lambda: comm.allreduce(
            np.ones(2), "mean"
        ),
        "unsupported dtype complex64; choose from float32": lambda: comm.allreduce(
            np.ones(2, np.complex64)
        ),
        "read-only": lambda: comm.allreduce(read_only),
        "not builtins.float": lambda: comm.allreduce([1.0, 2.0]),
        "need one dtype, not ['float32', 'float64']": lambda: comm.allreduce(
            [torch.ones(2), torch.ones(2, dtype=torch.float64)]
        ),
        "at least one tensor": lambda: comm.allreduce([]),
        "elements share memory": lambda: comm.allreduce(torch.ones(1).expand(4)),
        "root must be an integer from 0 to 2, not 9": lambda: comm.broadcast(np.ones(2), 9),
        "root must be an integer from 0 to 2, not True": lambda: comm.broadcast(np.ones(2), True),
        "not one of layout": lambda: comm.allreduce(torch.eye(3).to_sparse()),
    }.items():
        assert words in error_of(call), words
    x = np.full(5, rank)
    comm.allreduce(x)
    assert (x == 3).all()


@on_ranks(3)
def test_what_differs_between_ranks_is_an_error_on_every_rank(rank: int) -> None:
    comm = get_default()
    odd = rank == 1
    said = [
        error_of(comm.allreduce, np.ones(4 if odd else 5, np.float32)),
        error_of(comm.allreduce, np.ones(4, np.float64 if odd else np.float32)),
        error_of(comm.allreduce, np.ones(4), "max" if odd else "sum"),
        error_of(comm.barrier) if odd else error_of(comm.broadcast, np.ones(4), 2),
        error_of(comm.allreduce, [np.ones(3), np.ones(5)] if odd else [np.ones(5), np.ones(3)]),
        error_of(comm.allreduce, np.ones(4, np.complex64 if odd else np.float32)),
    ]
    x = np.full(5, rank)
    comm.allreduce(x)
    assert (x == 3).all()
    count, dtype, op, kind, layout, refused = said
    assert "ranks [0, 2]: allreduce(5 x float32, sum, auto)" in count
    assert "ranks [1]: allreduce(4 x float32, sum, auto)" in count
    assert "ranks [1]: allreduce(4 x float64" in dtype
    assert "ranks [1]: allreduce(4 x float64, max" in op
    assert "ranks [0, 2]: broadcast(4 x float64, " in kind
    assert "root 2); ranks [1]: barrier" in kind
    assert "in parts whose sizes have the checksum" in layout
    told = "ranks [1]: refused its arguments: unsupported dtype complex64"
    told = told.rpartition(": ")[2] if rank == 1 else told
    assert told in refused


def test_bad_settings() -> None:
    for words, kwargs in {
        "nprocs must be an integer of at least 1, not 0": {"nprocs": 0},
        "unknown machine 'dgx9'": {"topology": "dgx9"},
        "dgx1-v100 has 8 GPUs, fewer than the 9 ranks": {"nprocs": 9, "topology": "dgx1-v100"},
        "unknown order 'any'; choose from fastest, fixed": {"order": "any"},
        "timeout must be a positive number of seconds, not 0": {"timeout": 0},
        "GPU 0 cannot be used|GPU tensors need CuPy": {"device": "cuda:0"},
    }.items():
        arguments = {"nprocs": 2, **kwargs}
        with pytest.raises(CollectiveError, match=words):
            collectives.spawn(print, **arguments)  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match=r"call linkweave.init\(\) first"):
        collectives.allreduce(np.ones(3))


def test_init_alone_is_one_rank() -> None:
    x = np.arange(5.0)
    with collectives.init() as comm:
        assert (comm.rank, comm.size) == (0, 1)
        collectives.allreduce(x, "avg")
    collectives.shutdown()
    assert (x == np.arange(5.0)).all()


SCRIPT = """
import torch, torch.distributed as dist, collectives
for group in (False, True):
    if group:
        dist.init_process_group("gloo")
    comm = collectives.init(timeout=60)
    x = torch.full((1001,), comm.rank + 1.0)
    collectives.allreduce(x)
    assert (x == 3).all(), x
    print("fine", comm.rank, comm.size)
    collectives.shutdown()
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """Beside torch's own process group, and without one."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 4


ENDS = """
import os
import sys
import machines
if "MACHINES" in os.environ:
    machines.pretend(int(os.environ["RANK"]), (1, 1))
import numpy as np
import linkweave
linkweave.init(timeout=60)
linkweave.allreduce(np.ones(3))
if linkweave.get_default().rank == 1:
    %s
linkweave.allreduce(np.ones(3))
"""


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("raise ValueError('bad batch')", "rank 1 raised an exception"),
        ("raise KeyboardInterrupt", "rank 1 was interrupted"),
        ("sys.exit(0)", "rank 1 has returned or was closed"),
    ],
)
@pytest.mark.parametrize("where", [{}, {"MACHINES": "2"}])
def test_how_a_program_has_ended_is_told(last: str, words: str, where: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{ROOT}:{ROOT / 'tests' / 'cpu'}"
    env = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **where}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS % last], stderr=subprocess.PIPE, text=True,
            env={**env, "RANK": str(rank), "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    first, _ = (rank.communicate(timeout=100)[1] for rank in ranks)
    if where and "returned" in words:  # its connection tells no more
        words = "host1 (rank 1) has closed its connection: its first rank died or left"
    assert words in first


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "must be integers"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 must be from 0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but RANK is not"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4, but .* would be alone"),
        ({"PMI_SIZE": "2"}, r"set RANK \(to \$PMI_RANK\)"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "RANK=0 WORLD_SIZE=1 if it is to be alone"),
    ],
)
def test_a_broken_environment(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError, match=words):
        collectives.init(timeout=2)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(CollectiveError, match=words):
        DataParallel(model, torch.optim.SGD(model.parameters(), 0.1))


FOREIGN = """
import bench, collectives, kernels, topology
import linkweave
assert bench.mine and collectives.mine and kernels.mine and topology.mine
plan = linkweave.plan_allreduce(linkweave.topology.load("dgx1-v100"), 1 << 20)
print(plan.size, "planned")
"""


def test_folders_of_the_same_names_beside_a_script_do_no_harm(tmp_path: Path) -> None:
    for name in ("bench", "collectives", "kernels", "topology"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(FOREIGN)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 planned\n"


def test_the_folders_of_a_checkout_can_be_imported() -> None:
    code = (
        "import bench, collectives, kernels, topology, linkweave; "
        "assert collectives.plan_allreduce is linkweave.plan_allreduce; "
        "assert collectives.spawn is linkweave.spawn; assert topology.load is "
        "linkweave.topology.load; assert kernels.topk_abs is linkweave.kernels.topk_abs; "
        "assert {'__version__', 'allreduce', 'topology'} <= {*dir(linkweave)}; "
        "assert linkweave.__version__ == '0.1.0' and 'Any' not in dir(linkweave)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_collective_is_a_method_and_a_function_of_the_package() -> None:
    methods = {name for name in dir(Methods) if not name.startswith("_")} - {"rank", "size"}
    assert {*PUBLIC} <= methods <= {*collectives.__all__}


def test_a_collective_of_the_table_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a method, and no line in the package's own file."""
    monkeypatch.setattr(collective, "PUBLIC", (*PUBLIC, "scan"))
    monkeypatch.setattr(Communicator, "scan", lambda self, x: 2 * x, raising=False)
    path = Path(collectives.__file__)
    spec = spec_from_file_location("linkweave.collectives", path)
    assert spec and spec.loader
    package = module_from_spec(spec)
    spec.loader.exec_module(package)
    assert "scan" in package.__all__ and "scan" in dir(package)
    monkeypatch.setattr(communicator, "get_default", lambda: Communicator.__new__(Communicator))
    assert package.scan(21) == 42


@on_ranks(2)
def test_calls_while_torch_is_imported(rank: int) -> None:
    """A module that is being imported has no names yet."""
    x = np.full(4, rank, np.float32)
    sys.modules["torch"] = types.ModuleType("torch")
    collectives.allreduce(x, async_op=True).wait()
    collectives.allreduce(x)
    values, where = kernels.topk_abs(x, 1)
    assert [*x.tolist(), float(values[0]), int(where[0])] == [2.0] * 5 + [0]


def test_a_daemonic_process_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(CollectiveError, match="spawn was called in a daemonic process"):
        collectives.spawn(int, 2)


@on_ranks(2)
def test_ranks_of_spawn_do_not_join_alone(rank: int) -> None:
    """They would sum nothing, each on its own."""
    said = error_of(collectives.init)
    x = np.full(3, rank + 1.0)
    collectives.allreduce(x)
    assert "of 2 already, and would be alone" in said
    assert x.tolist() == [3.0] * 3


@on_ranks(2)
def test_a_child_of_a_rank_and_a_rank_that_has_closed_join_alone(rank: int) -> None:
    comm = collectives.get_default()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, error_of(collectives.init).encode() or b"joined")
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    comm.barrier()
    comm.close()
    assert said == "joined" and collectives.init().size == 1
