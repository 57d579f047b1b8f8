"""Run PyTorch's own tests of torch.distributed, which its wheel contains, on the backend linkweave.

    pip install expecttest
    python tests/torch_distributed.py [TEST ...]

Runs on 3 ranks each test that its decorators allow for gloo, 285 with those that a CPU build skips,
in about 4 minutes. Exits with 1 if a test fails that is not in REASONS, or passes that is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest

import torch

# the decorators of the tests read BACKEND while they are imported
os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=tempfile.mkdtemp())

from torch.testing._internal.distributed import distributed_test as suite

from linkweave.torch_backend import NAME, register

_BY_NAME = "the test sets up its model for backends that it knows by name"
_GLOO = "torch offers monitored_barrier for gloo only"
REASONS = {
    "test_accumulate_gradients_no_sync": _BY_NAME,
    "test_accumulate_gradients_no_sync_allreduce_hook": _BY_NAME,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _BY_NAME,
    "test_accumulate_gradients_no_sync_grad_is_view": _BY_NAME,
    "test_barrier_timeout_full_group": "it expects gloo's words; ours say who waits for whom",
    "test_monitored_barrier_gloo": _GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO,
    "test_monitored_barrier_gloo_subgroup": _GLOO,
}
"""Tests that gloo passes and linkweave does not, and why."""


class Test(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # a fork has torch imported already; the parent starts no threads
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    register()
    suite.BACKEND = NAME
    names = names or unittest.defaultTestLoader.getTestCaseNames(Test)
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(map(Test, names)))
    failed = {test.id().rpartition(".")[2] for test, _ in [*result.failures, *result.errors]}
    wrong = failed ^ (REASONS.keys() & {*names})
    skipped = len(result.skipped)
    print(f"{result.testsRun} tests, {skipped} skipped, {len(failed)} failed; "
          f"not as expected: {', '.join(sorted(wrong)) or 'none'}")  # fmt: skip
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
