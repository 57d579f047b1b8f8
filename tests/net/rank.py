"""One rank of a test on several hosts: `rank.py BODY ARGUMENT...` prints what BODY returns."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cpu")]

import numpy as np  # noqa: E402
import test_cluster  # noqa: E402
import torch  # noqa: E402

import linkweave  # noqa: E402
from linkweave.collectives import CollectiveError  # noqa: E402
from linkweave.collectives.training.transport import OverGroup  # noqa: E402


def everything(comm: Any) -> list[list[int]]:
    test_cluster.everything(comm)
    lanes = OverGroup(torch.distributed.group.WORLD)  # as parameters on GPUs get them
    lanes.open(1)
    lanes.average(0, x := torch.full((3,), float(comm.rank)))
    assert x.tolist() == [(comm.size - 1) / 2] * 3
    return [list(ranks) for ranks in comm.machines.ranks]


def on_and_on(comm: Any, seconds: float) -> str:
    """All-reduces of 4 MiB for so many seconds, each checked; how they end."""
    start, calls = time.monotonic(), 0
    x = np.empty(1 << 19)
    print("ready", flush=True)
    try:
        going = True
        while going:
            x[:] = comm.rank
            comm.allreduce(x)
            assert (x == sum(range(comm.size))).all()
            calls += 1
            late = np.array([time.monotonic() - start > seconds])
            comm.allreduce(late)  # all stop together
            going = not late[0]
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


if __name__ == "__main__":
    body, timeout, *arguments = sys.argv[1:]
    torch.distributed.init_process_group("linkweave")  # ranks start at different times
    torch.distributed.barrier()
    communicator = linkweave.init(timeout=float(timeout))
    found = globals()[body](communicator, *map(float, arguments))
    print(json.dumps(found), flush=True)
