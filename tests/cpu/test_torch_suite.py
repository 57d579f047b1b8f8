"""PyTorch's own tests of torch.distributed on the backend linkweave, by tests/torch_distributed.py.

`tests/data/torch_suite.txt` names those that pass on gloo with torch 2.13.0+cpu and 3 ranks, as
`python tests/torch_distributed.py --backend gloo | grep ^passed` prints them. For gloo on a CPU
torch skips the other 195.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GLOO = (TESTS / "data/torch_suite.txt").read_text().split()
MPI = [
    f"test_all_to_all{kind}{tensors}"
    for kind in ("", "_single_equal_split", "_single_unequal_split")
    for tensors in ("", "_complex", "_group", "_full_group")
]
"""Tests of all-to-all on the CPU, which torch skips for every backend but MPI."""
_MONITORED = "before 2.14 torch offers monitored_barrier for gloo only"
REASONS = {
    "test_barrier_timeout_full_group": "it expects gloo's words; ours say who waits for whom",
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
}
"""Tests that gloo passes and linkweave does not, and why."""
QUICK = {
    "test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_reduce_coalesced_sum",
    "test_broadcast", "test_reduce_sum", "test_all_gather", "test_all_gather_coalesced_simple",
    "test_gather", "test_scatter", "test_send_recv", "test_send_recv_any_source", "test_isend",
    "test_batch_isend_irecv_gloo", "test_barrier",
    "test_all_gather_object_default_pg", "test_all_gather_object_subgroup",
    "test_scatter_object_list", "test_broadcast_full_group", "test_get_future",
    "test_sparse_all_reduce_sum", "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
}  # fmt: skip
"""One test for each call but all-to-all, whose tests take a process of their own; `make test` runs
them."""

Run = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Run]:
    """What comes of a test: (passed, skipped or failed, why). A process for gloo's tests and one
    for MPI's run them, because torch reads at import for which backend they are."""
    runners: dict[str, subprocess.Popen[str]] = {}

    def run(name: str) -> tuple[str, str]:
        backend = "mpi" if name in MPI else "gloo"
        if backend not in runners:
            runners[backend] = subprocess.Popen(
                [sys.executable, "torch_distributed.py", "-"], cwd=TESTS, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | {"BACKEND": backend, "PYTHONPATH": str(TESTS.parent)},
                start_new_session=True,
            )  # fmt: skip
        runner = runners[backend]
        assert runner.stdin
        assert runner.stdout
        print(name, file=runner.stdin, flush=True)
        line = runner.stdout.readline()
        assert name in line.split()[1:2], f"{backend}'s process has ended or is late: {line!r}"
        word, _, why = line.split(" ", 2)
        return word, json.loads(why)

    yield run
    for runner in runners.values():
        os.killpg(runner.pid, signal.SIGKILL)
        runner.communicate()


def cases() -> list[object]:
    names = [name for name in (*GLOO, *MPI) if name not in REASONS]
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases())
def test_passes(name: str, outcome: Run) -> None:
    word, why = outcome(name)
    assert word == "passed", why


@pytest.mark.slow
@pytest.mark.parametrize("name", REASONS)
def test_an_exception_still_fails(name: str, outcome: Run) -> None:
    assert outcome(name)[0] == "failed", "take it out of REASONS"


def test_exceptions_are_few() -> None:
    assert REASONS.keys() <= set(GLOO)
    assert len(REASONS) <= len(GLOO) / 10
    assert set(GLOO) > QUICK
