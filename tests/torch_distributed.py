"""Run PyTorch's own tests of torch.distributed, which its wheel contains, on a backend.

    [BACKEND=mpi] python tests/torch_distributed.py [--backend gloo] [TEST ...]

Runs on 3 ranks each test that its decorators allow for BACKEND (gloo where unset), and prints a
line for each: passed, skipped or failed, its name, and why (JSON). What the tests themselves print
goes to stderr. With "-" it takes the names from stdin, as `tests/cpu/test_torch_suite.py` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import unittest
from typing import Any

# the decorators of the tests read BACKEND while they are imported; with BLAS on one thread this
# process has no second one, and may fork
os.environ.setdefault("BACKEND", "gloo")
os.environ.update(WORLD_SIZE="3", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120", OPENBLAS_NUM_THREADS="1")

import torch
import torch._dynamo  # which DDP imports: here once, not in every rank
from torch.testing._internal.distributed import distributed_test as suite

from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.torch_backend import register

AS_GLOO = "test_accumulate_gradients_no_sync"
"""How the tests begin that make a model only for backends that they know by name. Their ranks join
by the backend under test; then they are told that it is gloo, and use the same group."""


class Test(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # a fork has torch and the kernels already
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name: str, pipe: Any) -> None:
        if test_name.startswith(AS_GLOO):
            assert torch.distributed.get_backend() == suite.BACKEND
            suite.BACKEND = "gloo"
        super().run_test(test_name, pipe)


def outcome(name: str) -> str:
    """Run one test; its line."""
    result = unittest.TestResult()
    Test(name).run(result)
    if wrong := [*result.failures, *result.errors]:
        return f"failed {name} {json.dumps(wrong[0][1])}"
    if result.skipped:
        return f"skipped {name} {json.dumps(result.skipped[0][1])}"
    return f'passed {name} ""'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="linkweave")
    parser.add_argument("names", nargs="*", metavar="TEST")
    given = parser.parse_args()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    register()
    compile_kernels()  # once, not in each rank
    suite.BACKEND = given.backend
    names = given.names or unittest.defaultTestLoader.getTestCaseNames(Test)
    for name in sys.stdin if names == ["-"] else names:
        print(outcome(name.strip()), file=lines, flush=True)


if __name__ == "__main__":
    main()
