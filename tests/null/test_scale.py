"""Figure 14's table: simulation against closed forms, and what the table says."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from linkweave.bench.reproduce.scale import BANDWIDTH, RANKS, SIZES, Row, _row, table, wired

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ranks", "nbytes"), [(r, n) for r in (4, 8, 16, 64) for n in SIZES] + [(128, SIZES[1])]
)
def test_simulation_is_the_closed_form(ranks: int, nbytes: int) -> None:
    row = _row(ranks, nbytes)
    assert (row.ranks, row.nbytes, row.depth) == (ranks, nbytes, ranks.bit_length() - 1)
    assert row.worst < 1e-9
    assert row.tree < row.thin_tree and row.turnaround <= row.baseline_turnaround
    assert row.turnaround <= row.tree * 1.0001 or nbytes < SIZES[-1]


def test_trees_gain_on_the_ring_with_the_ranks() -> None:
    gains = [row.ring / row.tree for row in (_row(ranks, SIZES[0]) for ranks in (4, 8, 16, 64))]
    assert gains == sorted(gains) and gains[0] > 1.4 and gains[-1] > 9


def test_wired_counts_links_both_ways() -> None:
    machine = wired("three", 3, [(0, 1), (1, 0), (1, 2), (0, 1)], BANDWIDTH)
    assert {ends: link.count for ends, link in machine.by_ends.items()} == {
        (0, 1): 3, (1, 0): 3, (1, 2): 1, (2, 1): 1,
    }  # fmt: skip
    assert {(link.bandwidth, link.latency_us) for link in machine.links} == {(BANDWIDTH, 5.0)}
    assert machine.gpus == (0, 1, 2)


def test_worst_is_the_furthest_of_all_pairs() -> None:
    row = Row(4, 1024, 2, *[1.0] * 10)
    assert row.worst == 0
    for name in ("tree", "thin_tree", "ring", "turnaround", "baseline_turnaround"):
        assert replace(row, **{name: 0.75}).worst == 0.25
        assert replace(row, **{name: 1.5, f"{name}_form": 1.2}).worst == pytest.approx(0.25)


def test_the_table_stands_beside_the_papers_figures() -> None:
    found = [_row(ranks, nbytes) for ranks in (4, 8) for nbytes in SIZES]
    lines = table(found).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith(" ranks"))
    shown = [line.split() for line in lines[head + 1 : head + 7]]
    assert [words[:4] for words in shown] == [
        [str(ranks), *size, str(depth)]
        for ranks, depth in ((4, 2), (8, 3))
        for size in (["16", "KiB"], ["1", "MiB"], ["64", "MiB"])
    ]
    assert all(float(words[-1]) < 1e-9 for words in shown)
    rest = "\n".join(lines[head + 7 :])
    assert "paper: C1 over R up to 20 at 16 KB and 1 MB, up to 1.35 at 64 MB" in rest
    assert "turnaround 29, up to 69" in rest
    assert "nearest to 20 (small messages): 1.88 at 8 ranks, 16 KiB" in rest
    assert "nearest to 29 (64 MiB): 32.75 at 4 ranks, 64 MiB" in rest
    assert "nearest to 69 (64 MiB): 32.75 at 4 ranks, 64 MiB" in rest
    assert lines[-1].endswith(": 27.5 on average over these ranks, 32.7 at most")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_up_to_1024_ranks_in_4_gb() -> None:
    """In a process of its own, so that the memory is the table's."""
    script = "from linkweave.bench.reproduce.scale import rows\n"
    script += "for r in rows(): print(r.ranks, r.nbytes, r.worst)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=1700,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9, 4 * 10**9)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [(int(r), int(n)) for r, n, _ in found] == [(r, n) for r in RANKS for n in SIZES]
    assert all(float(worst) <= 0.01 for *_, worst in found)
