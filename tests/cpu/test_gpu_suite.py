"""The suite for one GPU, on a device of threads: the rows, and the runner that survives them."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_ranks import gpus, tensor
from gpu_vectors import sparse_gpus
from host_gpu import HostDevice, HostTensor, needs_compiler
from host_kernels import HostKernels

from linkweave import collectives, kernels
from linkweave.bench import gpu_suite
from linkweave.bench.gpu import calls, plans, runner, triton
from linkweave.bench.gpu.api import CupyArrays, TorchTensors, run_killed, run_ranks
from linkweave.bench.gpu.calls import beside_nccl, enqueue, new_sizes
from linkweave.bench.gpu.meter import MIB, Meter
from linkweave.bench.gpu.runner import Failed, Result, Row, in_process, run
from linkweave.bench.gpu.sparse import SparseRows, sparse_ranks
from linkweave.collectives.planning.planner import candidates
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.kernels.gpu.api import GpuKernels
from linkweave.topology import load


class HostArrays:
    name = "threads"

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = device

    def load(self) -> None:
        pass

    def put(self, array: np.ndarray) -> HostTensor:
        return tensor(array, array.dtype)

    def put_patterns(self, array: np.ndarray, dtype: str) -> None:
        """NumPy lacks them."""

    def get(self, x: Any) -> np.ndarray:
        return x.array if isinstance(x, HostTensor) else x

    def bytes_of(self, x: Any) -> np.ndarray:
        return self.get(x).view(np.uint8)

    def seen(self, n: int) -> HostTensor:
        return collectives.symmetric_empty(n)


class HostNumpy:
    name = "numpy"

    def load(self) -> None:
        pass

    def put(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def get(self, x: np.ndarray) -> np.ndarray:
        return x


# ---- the runner --------------------------------------------------------------------------------
def fine() -> Result:
    return {"figure": np.float32(1.5)}


def stuck() -> Result:
    time.sleep(60)
    return {}


def stopped() -> Result:
    os.kill(os.getpid(), signal.SIGSTOP)  # then the watchdog in the process is stopped as well
    return {}


def crashed() -> Result:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def exited() -> Result:
    print("the last words")
    os._exit(3)


def forked(path: Path) -> Result:
    if not (pid := os.fork()):
        time.sleep(60)
    path.write_text(str(pid))
    return {}


def outcomes(*rows: tuple[Callable[[], Result], float], budget: float = 1000.0) -> list[Result]:
    """Results of rows with these expected seconds."""
    made = [Row(f"row {i}", "core", seconds, measure) for i, (measure, seconds) in enumerate(rows)]
    return list(run(made, time.monotonic() + budget))


def test_a_row_that_crashes_hangs_or_exits_costs_that_row_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "START_S", 0.2)
    monkeypatch.setattr(runner, "GRACE_S", 100.0)  # the row's own watchdog ends it
    rows = outcomes((crashed, 60), (stuck, 0.1), (exited, 60), (fine, 60))
    assert [row["state"] for row in rows] == [
        "failed: killed by SIGSEGV", "failed: no result after 0 s",
        "failed: exited with status 3 and no result", "ok",
    ]  # fmt: skip
    assert "Segmentation fault" in rows[0]["stderr"] and "in crashed" in rows[0]["stderr"]
    assert rows[1]["stderr"].startswith("Timeout") and "in stuck" in rows[1]["stderr"]
    assert 0.5 <= rows[1]["took_s"] < 100
    assert "the last words" in rows[2]["stderr"]
    assert rows[3]["figure"] == 1.5 and "stderr" not in rows[3]


def test_a_row_whose_watchdog_is_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_S", 0.2)
    monkeypatch.setattr(runner, "GRACE_S", 0.3)
    rows = outcomes((stopped, 0.1), (fine, 60))
    assert [row["state"] for row in rows] == ["failed: no result after 0 s", "ok"]
    assert rows[0]["took_s"] >= 0.8


def test_what_a_row_has_started_is_killed(tmp_path: Path) -> None:
    (row,) = outcomes((partial(forked, tmp_path / "pid"), 9))
    assert row["state"] == "ok"
    with suppress(ProcessLookupError):  # it is gone
        process = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([process], [], [], 10)[0]
        os.close(process)


def test_a_row_has_its_own_environment() -> None:
    (row,) = outcomes((lambda: {"found": os.environ["CUDA_MODULE_LOADING"]}, 9))
    assert row["found"] == "EAGER"
    assert "CUDA_MODULE_LOADING" not in os.environ


def test_rows_that_take_longer_than_what_is_left_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def carried_out(row: Row, limit: float) -> Result:
        clock.now += min(limit, row.measure()["takes"])
        return {"state": "ok", "limit_s": limit}

    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "in_process", carried_out)
    given = [(5.0, 0.0), (1.0, 0.5), (0.5, 9.0), (1.0, 0.0)]  # expected, and taken
    made = [Row("row", "core", s, lambda t=t: {"takes": t}) for s, t in given]  # type: ignore[misc]
    rows = list(run(made, clock.now + runner.END_S + 2))
    assert [row["state"] for row in rows] == [
        "left out: 2 s are left", "ok", "ok", "left out: 0 s are left",
    ]  # fmt: skip
    assert [row.get("limit_s") for row in rows] == [None, 2.0, 1.5, None]


def test_rows_say_why_they_cannot_run() -> None:
    row = in_process(Row("row", "ipc", 1, partial(beside_nccl, HostArrays(), 1)), 9)
    assert row["state"] == "left out: NCCL needs a GPU for each rank, and this machine has 1"


class Sticky(HostDevice):
    """A product ends the context: every later use of the GPU fails."""

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        super().launch(dtype, op, launch, blocks, stream)
        if op == "prod":
            self.die("an illegal memory access")

    def free(self, address: int) -> None:
        if self.error:
            raise RuntimeError("a later error")
        super().free(address)


@needs_compiler
def test_a_broken_context_costs_one_row_and_its_first_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, plan = Meter(1), collectives.plan_allreduce(load("mesh-2"), 400)

    def checked(op: str) -> Result:
        with meter.ranks(2) as ranks:
            plans.check(meter, ranks, plan, 400, "float32", op)
        return {}

    with gpus(monkeypatch, lambda index: Sticky(index=index)):
        rows = outcomes((partial(checked, "prod"), 9), (partial(checked, "sum"), 9))
    assert rows[0]["state"] == "failed: RuntimeError: an illegal memory access"
    assert "a later error" not in rows[0]["stderr"]
    assert rows[1]["state"] == "ok"


class Wrong(HostDevice):
    """One bit of what is read back is wrong."""

    def download(self, address: int, array: np.ndarray) -> None:
        super().download(address, array)
        array.view(np.uint8)[-1] ^= 1


@needs_compiler
@pytest.mark.parametrize("name", ["algorithms", "abort", "bandwidth", "dequeue"])
def test_a_wrong_result_is_a_failed_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, lambda index: Wrong(index=index)):
        (row,) = outcomes((partial(MEASURES[name], Meter(1)), 9))
    assert row["state"].startswith("failed: Failed: ")
    assert row["state"].endswith(": 1 wrong bytes")


@needs_compiler
def test_a_row_that_needs_more_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(HostDevice):
        def allocate(self, nbytes: int) -> int:
            raise MemoryError

    with gpus(monkeypatch, lambda index: Small(index=index)):
        (row,) = outcomes((partial(MEASURES["bandwidth"], Meter(1)), 9))
    assert row["state"].startswith("left out: it needs 2 times 1 MiB")


@needs_compiler
@pytest.mark.parametrize("multiprocessors", [8, 17, 132])
def test_launches_that_wait_for_each_other_run_at_once(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, lambda index: HostDevice(multiprocessors, index=index)):
        (row,) = outcomes((partial(plans.side_by_side, Meter(1), 60.0), 90))
    assert row["state"] == "ok", row


@needs_compiler
def test_launches_that_run_one_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "one_queue", True)
    with gpus(monkeypatch):
        (row,) = outcomes((partial(plans.side_by_side, Meter(1), 0.5), 9))
    assert row["state"].startswith("left out: this GPU carries out one launch after the other"), row


# ---- the rows and the command -------------------------------------------------------------------
def test_every_row_declares_its_seconds_and_a_part_fits_its_budget() -> None:
    every = [*gpu_suite.rows(Meter(), [CupyArrays(), TorchTensors()], 1)]
    assert len({row.name for row in every}) == len(every)
    assert all(row.seconds > 0 for row in every)
    assert {row.part for row in every} == {"core", "ipc"}
    for part in ("core", "ipc"):
        seconds = sum(row.seconds for row in every if row.part == part)
        assert seconds < gpu_suite.BUDGET_S - runner.END_S


def test_the_command_writes_after_every_row_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"

    def written() -> Result:
        return {"rows_before": len(json.loads(out.read_text())["rows"]), "list": [1]}

    rows = [Row("a b", "ipc", 9, fine), Row("a c", "ipc", 9, written),
            Row("a", "core", 9, crashed), Row("d", "ipc", 9, crashed)]  # fmt: skip
    monkeypatch.setattr(gpu_suite, "described", lambda meter: {"gpus": 1})
    monkeypatch.setattr(gpu_suite, "rows", lambda meter, libraries, gpus: rows)
    assert gpu_suite.main(["ipc", "--only", "a b", "--only", "a c", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["part"] == "ipc" and told["device"]["gpus"] == 1
    assert [row["name"] for row in told["rows"]] == ["a b", "a c"]
    assert told["rows"][1]["rows_before"] == 1 and told["rows"][1]["list"] == [1]
    assert gpu_suite.main(["ipc", "--only", "d"]) == 1
    printed = capsys.readouterr().out
    assert '"figure": 1.5' in printed and '"list"' not in printed
    assert printed.endswith(" 9  d: failed: killed by SIGSEGV\n")
    with pytest.raises(SystemExit):
        gpu_suite.main(["core", "--only", "b"])
    assert "no row of core has 'b' in its name" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main([]) == 2
    assert "no GPU to run on: " in capsys.readouterr().err


# ---- measurements -------------------------------------------------------------------------------
SETTINGS = {"algorithm", "chunks", "chunk_bytes", "slots", "slot_bytes", "protocol", "pushes",
            "width", "blocks", "resident", "threads", "registers"}  # fmt: skip
MEASURES: dict[str, Callable[[Meter], Result]] = {
    "algorithms": partial(plans.algorithms, machines=("mesh-3",), sizes=(4036,)),
    "dtypes": plans.dtypes, "abort": plans.abort, "side by side": plans.side_by_side,
    "latency": plans.latency, "hop": plans.hop, "bandwidth": partial(plans.bandwidth, nbytes=MIB),
    "capped": partial(plans.overlap, nbytes=MIB, link=plans.LINK),
    "uncapped": partial(plans.overlap, nbytes=MIB, link=None),
    "dequeue": partial(gpu_suite.dequeue, nbytes=MIB),
    "matrices": partial(calls.beside_matmul, nbytes=1 << 16, link=1e8, matrix=64, where="cpu"),
}  # fmt: skip


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch, multiprocessors: int = 67) -> Iterator[Meter]:
    """A meter of a GPU made of threads, of which nothing is left in the end."""
    with gpus(monkeypatch, lambda index: HostDevice(multiprocessors, index=index)):
        yield Meter(1)


@needs_compiler
@pytest.mark.parametrize("name", MEASURES)
def test_plans_are_measured_with_their_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(monkeypatch) as meter:
        row = MEASURES[name](meter)
    nested = [v for v in row.values() if isinstance(v, dict)]
    assert all(v["settings"].keys() == SETTINGS for v in (row, *nested) if "settings" in v)
    if name == "matrices":
        assert [r["blocks"] for r in row["rows"]] == [14 * width for width in (8, 4, 2, 1)]
        least = row["bytes"] / row["link_bytes_per_s"]  # `hidden` depends on what else runs here
        assert all(r["allreduce_s"] >= least and math.isfinite(r["hidden"]) for r in row["rows"])


@needs_compiler
def test_what_is_hidden_is_a_share_of_the_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(monkeypatch) as meter:
        told = chain([0.5], cycle([2.0, 5.0]))  # a product; an all-reduce, and both together

        def seconds(call: Any, wait: Any, repeats: int) -> float:
            call()
            wait()
            return next(told)

        monkeypatch.setattr(meter, "seconds", seconds)
        row = MEASURES["matrices"](meter)
    # 2 all-reduces beside 8 products, each 4 s alone
    assert [(r["allreduce_s"], r["hidden"]) for r in row["rows"]] == [(2.0, 0.75)] * 4


@needs_compiler
def test_plans_with_more_blocks_than_a_gpu_holds_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with measured(monkeypatch) as meter:
        row = plans.algorithms(meter, ["dgx1-v100"], [4036])
    assert row["checked"] % 4 == 0 and row["checked"] > 4 * 5
    assert any("packed_trees needs 255 thread blocks" in text for text in row["skipped"])


def compiles(source: str, options: tuple[str, ...], architecture: int) -> bytes:
    """In place of `cubin`, in other processes."""
    assert "run_plan" in source and architecture == 90
    with open(os.environ["COMPILED"], "a") as file:
        file.write(" ".join(options) + "\n")
    return b""


@needs_compiler
def test_all_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = SimpleNamespace(compute_capability="90")
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda index: gpu))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(plans, "cubin", compiles)
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    with measured(monkeypatch) as meter:
        row = plans.compiled(meter)
    made = (tmp_path / "compiled").read_text().splitlines()
    assert len(made) == len(set(made)) == row["compiled"]
    by_name = {(kernel["dtype"], kernel["op"]): kernel for kernel in row["kernels"]}
    assert len(by_name) == len(row["kernels"]) > len(made)
    assert all(kernel["registers"] > 0 < kernel["resident"] for kernel in by_name.values())


class FewSparse(SparseRows):
    checked_sizes = (1, 1000)


@needs_compiler
def test_the_rows_of_sparse_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(monkeypatch) as meter:
        rows = FewSparse(meter, HostNumpy(), GpuKernels(HostKernels()))
        assert rows.correct()["checked"] == 6 * (2 + 4) + 2 * 2 + 2 + 2 * 3
        for row in (rows.topk(5000), rows.sparsify(5000), rows.coalesce(300, 5, 40)):
            assert row["seconds"] > 0
        rows.api.topk_abs = lambda x, k: kernels.topk_abs(-x, k)
        with pytest.raises(Failed, match=r"topk_abs of 5000 float32, k = 5 is not what the CPU"):
            rows.topk(5000)
        rows.api.sparsify = lambda x, residual, k: kernels.sparsify(x, residual.copy(), k)
        with pytest.raises(Failed, match=r"residual of 5000 is not what the CPU"):
            rows.sparsify(5000)


# ---- public calls -------------------------------------------------------------------------------
@needs_compiler
@pytest.mark.parametrize(("virtual", "ranks"), [(True, 2), (True, 8), (False, 2), (False, 4)])
def test_collectives_are_checked(
    virtual: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, lambda index: HostDevice(65, index=index)):
        row = run_ranks(HostArrays(), ranks, (1, 2048, 30_000), virtual)
    able = len(candidates(load("mesh-2")))
    of_dtypes = sum(len(ops_of(d)) for d, about in DTYPES.items() if about.stored == d)
    each = 4 + 3 * 11 + 2 + of_dtypes + 8
    if ranks == 2:
        assert row["checked"] == 2 * (2 * able + each) + 1  # a reduction, of one rank
    else:
        assert row["checked"] >= ranks * (10 + each)


@needs_compiler
def test_a_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch):
        assert run_killed(HostArrays())["seconds"] < 45


@needs_compiler
@pytest.mark.parametrize("virtual", [True, False])
def test_sparse_all_reduces_are_checked_and_timed(
    virtual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sparse_gpus(monkeypatch):
        row = sparse_ranks(Meter(), HostArrays(), 2, virtual, 1 << 14 if virtual else 0, 2)
    assert row["checked"] == 2 * 3 * 3 * 2 * 2
    assert ("seconds" in row) == virtual
    assert not virtual or row["settings"].keys() == SETTINGS


@needs_compiler
@pytest.mark.parametrize("virtual", [True, False])
def test_the_host_s_time_of_a_call(virtual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch):
        row = enqueue(HostArrays(), (1, 2), virtual, 1)
    assert row.keys() == {"1 ranks", "2 ranks"}
    assert all(found["enqueue_us"] > 0 for found in row.values())
    with gpus(monkeypatch):
        row = new_sizes(HostArrays(), 2, virtual, 3)
    assert row["ranks"] == 2 and row["first_call_us"] > 0


@pytest.mark.parametrize("wrong", [0, 3])
def test_all_reduces_beside_another_library(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_command` runs what measures them."""

    def run(asked: Any) -> list[Any]:
        assert (asked.ranks, asked.device, asked.collectives) == (4, "cuda", ("allreduce",))
        times = product(asked.sizes, (("linkweave", 20), ("nccl", 10)))
        return [SimpleNamespace(library=library, size=size, time_us=us, wrong=wrong)
                for size, (library, us) in times]  # fmt: skip

    monkeypatch.setattr(calls, "run", run)
    if wrong:
        with pytest.raises(Failed, match=r"linkweave, 400 bytes; nccl, 400 bytes$"):
            beside_nccl(HostArrays(), 4, (400,))
    else:
        found = beside_nccl(HostArrays(), 4, (400,))["400 bytes"]
        assert found == {"seconds": 2e-5, "nccl": {"seconds": 1e-5, "times_ours": 0.5}}


def test_kernels_of_a_step_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where both sides of each check are the CPU's kernels."""
    monkeypatch.setattr(triton, "WIDTH", 8)

    def seconds(call: Callable[[], object], check: object) -> float:
        call()
        return 2.0

    meter: Any = SimpleNamespace(
        seconds=seconds, copy_rate=lambda nbytes: 1.0, device=SimpleNamespace(finish=None)
    )
    made = triton.TritonRows(meter, "cpu", 10_000)
    found = {row.name.removeprefix("Triton, "): row.measure() for row in made.rows()}
    assert found.keys() == {"cast", "adam", "sgd", "select", "lookup", "adam_rows"}
    assert all(row["of_floor"] == 2 / row["bytes"] for row in found.values())
    checks = triton.TritonRows(None, "cpu", 10_000)
    assert checks.correct() == {}
    monkeypatch.setattr(kernels.embedding, "lookup", lambda table, indices, out: out.normal_())
    with pytest.raises(Failed, match="lookup is not what the CPU finds"):
        checks.correct()
