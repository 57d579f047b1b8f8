"""Guards against becoming slower: counted work, and ratios to others within one run.

None looks at absolute seconds, so a slow or busy machine fails nothing that it should not.
"""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from linkweave import kernels, plan_allreduce, topology
from linkweave.bench.collectives import Settings, run
from linkweave.bench.sparse import medians

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

PLANNING = {"dgx1-v100": 1_012_704, "dgx-h100": 1_276_717, "4 x dgx-h100 nic=24GB/s": 7_079_624}
"""Calls of Python functions to plan an all-reduce of 64 MiB in a fresh process: what a change of
more than MORE has to explain."""
MORE = 1.2


def calls_to_plan(machine: str) -> int:
    """The calls of Python functions, which differ by less than 0.1 % from run to run."""
    profile = cProfile.Profile()
    found = topology.load(machine)
    profile.enable()
    plan_allreduce(found, 64 << 20)
    profile.disable()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("machine", PLANNING)
def test_planning_does_not_take_more_calls(machine: str) -> None:
    code = (
        f"from tests.cpu.test_regressions import calls_to_plan\nprint(calls_to_plan({machine!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True, timeout=280)  # fmt: skip
    calls = int(done.stdout)
    assert calls <= MORE * PLANNING[machine], f"{calls} calls, {PLANNING[machine]} before"


def test_top_k_stays_far_ahead_of_torch() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)
    tensor, k = torch.from_numpy(values), 4096
    seconds = medians(
        {"ours": lambda: kernels.topk_abs(values, k), "torch": lambda: torch.topk(tensor.abs(), k)},
        7,
    )
    assert seconds["torch"] > 4 * seconds["ours"]  # recorded: 38 times at 25 M


def test_an_all_reduce_stays_ahead_of_gloo() -> None:
    rows = [*run(Settings(4, (1 << 16, 4 << 20), topology.load("cpu-4")))]
    for size in {row.size for row in rows}:
        times = {row.library: row.time_us for row in rows if row.size == size}
        assert times["gloo"] > 1.5 * times["linkweave"], times
