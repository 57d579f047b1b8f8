"""Faults that users of torch.distributed meet: groups called in other orders, restarts, no disk."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machines import forked
from test_distributed import run

from linkweave.torch_backend import register
from tests.cpu.helpers import hurry, shared_files

ROOT = Path(__file__).parents[2]


def opposite(rank: int) -> str:
    """Rank 0 calls its first group and then its second, rank 1 the other way round."""
    groups = [dist.new_group(timeout=timedelta(seconds=200)) for _ in range(2)]
    for group in groups:
        hurry(group.communicator, 1)
    try:
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(torch.ones(3), group=group)
    except Exception as error:
        return str(error)
    return "nothing was noticed"


def test_two_groups_in_opposite_order() -> None:
    found = run(2, opposite)
    for rank, said in enumerate(found):
        assert f"rank {rank} waits for rank {1 - rank}" in said or "gave up" in said, found
    assert any("waits for" in said for said in found)


_DIES = """
    if step == 25 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""


def test_torchrun_restarts_a_job_that_has_lost_a_rank(tmp_path: Path) -> None:
    """The script of docs/howto/restart.md; it ends as one that nobody disturbs."""
    page = (ROOT / "docs/howto/restart.md").read_text()
    (script,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert script.count("    optimizer.zero_grad()\n") == 1
    before = shared_files()
    (tmp_path / "train.py").write_text(
        script.replace("    optimizer.zero_grad()\n", f"{_DIES}    optimizer.zero_grad()\n")
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", "train.py"],
        capture_output=True, text=True, timeout=280, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    died = done.stdout.split()
    for survivor in re.findall(r"Collective\w+: .*", done.stderr):  # unless torchrun was faster
        assert re.match(r"CollectiveAborted: .*rank 1 \(process \d+\) died", survivor)
    (folder := tmp_path / "whole").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def undisturbed(rank: int) -> list[str]:
        os.chdir(folder)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
        with redirect_stdout(StringIO()) as said:
            exec(script, {"__name__": "__main__"})
        return said.getvalue().split()

    whole = forked(2, undisturbed)[0]
    assert whole[:4] == ["steps", "0", "to", "60"], whole
    assert died[:4] == ["steps", "20", "to", "60"]
    assert whole[5:] == died[5:]
    assert shared_files() == before


def test_a_store_on_a_full_disk_is_an_error() -> None:
    register()
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="No space left on device"):
        dist.init_process_group(
            "linkweave", init_method="file:///dev/full", rank=0, world_size=1,
            timeout=timedelta(seconds=200),
        )  # fmt: skip
    assert time.monotonic() - start < 100
    assert not dist.is_initialized()
