"""The suite for one GPU, on a device of threads: it runs, checks and goes on after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import gpus, tensor
from gpu_vectors import sparse_gpus
from host_gpu import HostDevice, HostTensor, needs_compiler
from host_kernels import HostKernels

from linkweave import collectives, kernels
from linkweave.bench.gpu_api import Failed
from linkweave.bench.gpu_sparse import SparseRows
from linkweave.bench.gpu_suite import Suite, main, run
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import candidates
from linkweave.collectives.runtime.gpu.executor import GpuRanks
from linkweave.kernels.gpu.api import GpuKernels
from linkweave.topology import load


class HostArrays:
    name = "threads"

    def put(self, array: np.ndarray) -> HostTensor:
        return tensor(array, array.dtype)

    def get(self, x: Any) -> np.ndarray:
        return x.array if isinstance(x, HostTensor) else x

    def seen(self, n: int) -> HostTensor:
        return collectives.symmetric_empty(n)


@needs_compiler
@pytest.mark.parametrize("only", ["threads, threads", "processes, threads"])
def test_the_rows_of_the_public_api(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, lambda index: HostDevice(65, index=index)):
        (row,) = run(Suite(None, libraries=[HostArrays()]), 100, only, None)
    assert row["state"] == "ok", row
    able = len(candidates(load("mesh-2")))
    assert row["2 ranks"]["checked"] == 2 * (2 * able + 4 + 3 * 9 + 2 + 32)
    assert row["8 ranks"]["checked"] >= 8 * (4 + 3 * 9 + 2 + 10)


class Few(Suite):
    """The first row, of which one size is enough."""

    def check(
        self, ranks: GpuRanks, plan: Plan, nbytes: int, dtype: str, op: str, apart: bool = False,
        seen: bool = True,
    ) -> None:  # fmt: skip
        if nbytes == 4036 and apart != seen:
            super().check(ranks, plan, nbytes, dtype, op, apart, seen)


@needs_compiler
def test_plans_with_more_blocks_than_a_gpu_holds_are_skipped() -> None:
    (row,) = run(Few(HostDevice(67), 1 << 16, 1, ()), 100, "correct algorithms", None)
    assert row["state"] == "ok", row
    assert any("packed_trees needs 255 thread blocks" in text for text in row["skipped"])


@needs_compiler
def test_the_row_of_a_rank_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch):
        (row,) = run(Suite(None, libraries=[HostArrays()]), 100, "killed", None)
    assert row["state"] == "ok", row


@needs_compiler
@pytest.mark.parametrize(
    "only",
    ["dtypes", "abort", "8 KiB", "hop", "emulated links 1 MiB", "uncapped 1 ", "35 N", "dequeue"],
)
def test_rows_are_measured_and_written(only: str, tmp_path: Path) -> None:
    device = HostDevice()
    out = tmp_path / "rows.json"
    (row,) = run(Suite(device, 1 << 20, 1, ()), 100, only, out)
    assert row["state"] == "ok", row
    assert json.loads(out.read_text())["rows"][0]["name"] == row["name"]
    assert not device.memory


class HostNumpy:
    name = "numpy"

    def put(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def get(self, x: np.ndarray) -> np.ndarray:
        return x


class FewSparse(SparseRows):
    checked_sizes = (1, 1000)

    def rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        yield "correct", self.correct
        yield "topk", lambda: self.topk(5000)
        yield "sparsify", lambda: self.sparsify(5000)
        yield "coalesce", lambda: self.coalesce(300, 5, 40)


@needs_compiler
def test_the_rows_of_sparse_kernels() -> None:
    api = GpuKernels(HostKernels())
    rows = dict(FewSparse(Suite(HostDevice(), 1 << 20, 1, ()), HostNumpy(), api).rows())
    assert rows["correct"]()["checked"] == 6 * (2 + 4) + 2 * 2 + 2 + 3
    for name in ("topk", "sparsify", "coalesce"):
        assert rows[name]()["seconds"] > 0
    api.topk_abs = lambda x, k: kernels.topk_abs(-x, k)  # type: ignore[method-assign]
    with pytest.raises(Failed, match=r"topk_abs of 5000 float32, k = 5 is not what the CPU finds"):
        rows["topk"]()


def test_names_of_sparse_rows() -> None:
    names = [name for name, _ in SparseRows(Suite(HostDevice()), HostNumpy()).rows()]
    assert names[1:3] == ["topk_abs of 33554432", "sparsify of 33554432"] and len(names) == 7


@needs_compiler
@pytest.mark.parametrize("only", ["threads, 2 threads", "2 processes"])
def test_the_rows_of_sparse_all_reduces(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with sparse_gpus(monkeypatch):
        (row,) = run(Suite(None, 1 << 16, 1, [HostArrays()]), 100, only, None)
    assert row["state"] == "ok", row
    assert row["checked"] == 2 * 3 * 3 * 2 * 2
    assert ("seconds" in row) == ("threads" in only)


class Wrong(HostDevice):
    """One bit of what is read back is wrong."""

    def download(self, address: int, array: np.ndarray) -> None:
        super().download(address, array)
        array.view(np.uint8)[-1] ^= 1


@needs_compiler
def test_a_wrong_result_is_a_failed_row_and_the_next_ones_are_run() -> None:
    rows = run(Suite(Wrong(), 1 << 20, 1, ()), 100, "", None)
    states = [row["state"] for row in rows]
    assert all(": 1 wrong bytes on rank 0" in state for state in states[:3])
    assert states[3:5] == ["ok"] * 2
    assert states[5:] == [
        "failed: Failed: the first layer is wrong when it is dequeued",
        "failed: Failed: overlapped_double_tree 1048576 bytes: rank 0 is wrong",
        *["failed: Failed: double_tree 1048576 bytes: rank 0 is wrong"] * 2,
    ]


@needs_compiler
def test_what_the_budget_does_not_admit_is_named() -> None:
    rows = run(Suite(HostDevice()), -1, "links", None)
    assert {row["state"] for row in rows} == {"left out: the budget was spent"}
    assert len(rows) == 5


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no GPU to run on: " in capsys.readouterr().err
