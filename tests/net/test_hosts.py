"""Ranks on hosts that share nothing but a network: real machines, as far as they can tell."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faults
import pytest
from hosts import Hosts, missing

from linkweave.collectives.cluster.cluster_map import ClusterMap

RANK = str(Path(__file__).with_name("rank.py"))
FAULTS = str(Path(__file__).with_name("faults.py"))
WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(*getattr(request, "param", (2,))) as made:
        yield made


def result(process: subprocess.Popen[str]) -> Any:
    """What a rank returned."""
    output, _ = process.communicate(timeout=280)
    lines = output.splitlines()
    assert process.returncode == 0, output
    return json.loads(lines[-1])


def await_ready(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        lines: list[str] = []
        while "ready\n" not in lines:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [((2, "10gbit"), (1, 2)), pytest.param((3, "10gbit"), (2, 1, 2), marks=pytest.mark.slow)],
    indirect=["hosts"],
)
def test_collectives_over_a_network(hosts: Hosts, sizes: tuple[int, ...]) -> None:
    """Under the variables of torchrun, which do not tell gloo the interface."""
    ranks, first = hosts.ranks(sizes, [RANK, "everything", "30"], {"GLOO_SOCKET_IFNAME": ""}), 0
    machines = []
    for size in sizes:
        machines.append([*range(first, first + size)])
        first += size
    assert [result(rank) for rank in ranks] == [machines] * sum(sizes)


@pytest.mark.slow
def test_a_link_that_goes_down_is_named(hosts: Hosts) -> None:
    ranks = hosts.ranks((2, 1), [RANK, "on_and_on", "2", "20"])
    await_ready(ranks)
    hosts.link(1, "down")
    start = time.monotonic()
    said = [result(rank) for rank in ranks]
    assert time.monotonic() - start < 100
    for rank, words in enumerate(said):
        away = "host1 (rank 2)" if rank < 2 else "host0 (ranks 0, 1)"
        assert words.startswith(f"CollectiveTimeout: rank {rank}, allreduce("), said
        assert f"{away} has not answered for" in words, said


@pytest.mark.slow
def test_a_link_that_comes_back_in_time_does_no_harm(hosts: Hosts) -> None:
    ranks = hosts.ranks((1, 1), [RANK, "on_and_on", "20", "4"])
    await_ready(ranks)
    for _ in range(2):
        hosts.link(1, "down")
        time.sleep(0.5)
        hosts.link(1, "up")
        time.sleep(0.5)
    assert [result(rank) for rank in ranks] == ["fine"] * 2


@pytest.mark.slow
def test_the_network_is_measured(hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    command = ["-m", "linkweave", "bench", "network", "-r", "1", "-b", "1K", "-e", "1M"]
    ranks = hosts.ranks((1, 2), [*command, "--out", str(out)])
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    rows = [line.split() for line in outputs[0].splitlines() if line.startswith("allreduce")]
    assert [int(row[1]) // 12 for row in rows] == [(1 << at) // 12 for at in range(10, 21, 2)]
    assert {row[6] for row in rows} == {"0"}
    made = ClusterMap.from_json(out.read_text())
    assert made.ranks == (1, 2) and {*made.times} == {"allreduce"}
    # what leaves a machine is the whole message, at 1 Gbit/s
    assert 7e-9 < made.network.seconds_per_byte < 40e-9


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1), (2, 1, 2)])
def test_100_faults(sizes: tuple[int, ...]) -> None:
    """No rank hangs or gets a wrong result, whatever becomes of another one or of a link."""
    with Hosts(len(sizes), "10gbit") as hosts:
        ranks = [
            hosts.start(
                host, [sys.executable, FAULTS, str(host), json.dumps(sizes), "0", "100"],
                {"MASTER_ADDR": hosts.address(0)},
            )
            for host in range(len(sizes))
        ]  # fmt: skip
        with ThreadPoolExecutor(len(ranks)) as readers:
            outputs = [*readers.map(lambda rank: rank.communicate()[0], ranks)]
    jobs: dict[int, dict[int, str]] = {}
    for output in outputs:
        opened = set()  # files, after each job but the first
        for line in output.splitlines():
            if not line.startswith("job "):
                continue
            seed, said, alive, files = json.loads(line[4:])
            kind, who = faults.fault(seed, sum(sizes))
            assert {*alive} <= ({who} if kind in faults.LOST else set()), (seed, line)
            opened |= {files} if seed else set()
            jobs.setdefault(seed, {}).update({int(rank): text for rank, text in said.items()})
        assert len(opened) <= 1, output
    assert len(jobs) == 100, outputs
    for seed, found in jobs.items():
        kind, who = faults.fault(seed, sum(sizes))
        lost = {who} if kind in faults.LOST else set()
        assert {*found} == {*range(sum(sizes))} - lost, (seed, kind, found)
        for said in found.values():
            seconds, words = said.split(" s, ", 1)
            assert float(seconds) < 30, (seed, kind, found)
            if kind == "blink":
                assert words == "fine", (seed, kind, found)
            else:
                assert words.startswith(("Collective", "ValueError")), (seed, kind, found)
