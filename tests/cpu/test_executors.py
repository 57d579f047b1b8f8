"""What executors refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave.collectives import CollectiveError, plan_allreduce
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.reference import run
from linkweave.topology import load
from tests.cpu.helpers import RankPlans, error_of


@on_ranks(2)
def test_chunks_that_do_not_fit_slots_are_refused(rank: int) -> None:
    comm: Any = get_default()
    x = np.ones(100_000, np.float32)
    plan = plan_allreduce(load("cpu-2"), 4, "tree", 1)
    said = error_of(RankPlans(comm).execute, plan, [x])
    assert "do not fit slots of 65536" in said


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(CollectiveError, match="the plan is for 5 ranks, not 1 inputs"):
        run(plan_allreduce(load("mesh-5"), 20_000, "chain"), [np.ones(3)])
