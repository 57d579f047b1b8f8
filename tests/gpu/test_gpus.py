"""The tests of `linkweave selftest` that need GPUs, under pytest: `pytest tests/gpu`."""

from __future__ import annotations

import pytest

from linkweave.bench.command import selftest
from linkweave.bench.gpu.runner import Row, in_process

LOOK = Row("look", "selftest", selftest.LOOK_S, selftest.look)
GPUS = in_process(LOOK, LOOK.seconds).get("gpus", 0)  # ranks are forked, so CUDA starts in them
ROWS = [row for row in selftest.tests(range(GPUS)) if "GPU" in row.name]

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(1800)  # each has a limit of its own
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_on_gpus(row: Row) -> None:
    found = selftest.ended(row)
    if found.state == "left out":
        pytest.skip(found.detail)
    assert found.state == "ok", f"{found}\n{found.about.get('stderr', '')}"
