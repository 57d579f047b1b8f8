"""The README's figures are those of bench/results, and its bounds follow from bytes and rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from linkweave import topology

ROOT = Path(__file__).parents[2]
NIC = 125e6  # bytes per second at 1 Gbit/s
TABLE = {
    cells[0]: cells[1:]
    for line in (ROOT / "README.md").read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
}


def rows(name: str, key: str, **chosen: Any) -> dict[str, dict[str, Any]]:
    """The rows of a file in bench/results whose columns have the chosen values, by column `key`."""
    found = json.loads((ROOT / f"bench/results/{name}.json").read_text())["rows"]
    return {
        row[key]: row for row in found if all(row[name] == value for name, value in chosen.items())
    }


@pytest.mark.parametrize(("size", "digits"), [(1, 2), (64, 1)])
def test_allreduces(size: int, digits: int) -> None:
    found = rows("cpu-8-epyc-2-cores", "library", size=size << 20)
    (mpi,) = (name for name in found if "MPI" in name)
    ours, peer, gloo = (
        f"{found[name]['time_us'] / 1e3:.{digits}f}" for name in ("linkweave", mpi, "gloo")
    )
    bound = 1e3 * (size << 20) / topology.allreduce_bound(topology.load("cpu-8"))
    assert TABLE[f"all-reduce, 8 CPU ranks, {size} MiB"][:3] == [
        ours,
        f"Intel MPI {peer}, gloo {gloo}",
        f"{bound:.{digits}f}",
    ]


def test_top_k() -> None:
    found = rows("sparse-epyc-2-cores", "implementation", what="topk", threads=1)
    ours = found["linkweave"]
    bound = ours["ms"] * ours["of_floor"]
    assert TABLE["top-k of 25 M values, one thread"][:3] == [
        f"{ours['ms']:.1f}",
        f"numpy.partition (no indices) {found['numpy.partition']['ms']:.1f}, "
        f"torch.topk {found['torch.topk']['ms']:.1f}",
        f"{bound:.1f}",
    ]


def test_training() -> None:
    for file, what in (
        ("vgg11-4x1", "a step of VGG-11, 4 hosts"),
        ("resnet18-4x2", "a step of ResNet-18, 4 hosts x 2 ranks"),
    ):
        (row,) = rows(f"train-{file}-1gbit", "model").values()
        bound = 1e3 * 2 * (1 - 1 / 4) * row["nbytes"] / NIC  # each host's share, in and out
        assert TABLE[what][:3] == [
            f"{row['ms']:,.0f}",
            f"DDP {row['ddp_ms']:,.0f}",
            f"{bound:,.0f}",
        ]


def test_gtopk() -> None:
    found = rows("gtopk-vgg16-4-hosts-1gbit", "hook")
    entries = found["gTop-k"]["values"] // 1000
    bound = 1e3 * 2 * 2 * 8 * entries / NIC  # equation 7: 2 log2 P messages of k entries
    assert TABLE["gTop-k exchange of VGG-16, 4 hosts"][:3] == [
        f"{found['gTop-k']['exchange_ms']:.0f}",
        f"top-k {found['top-k']['exchange_ms']:.0f}, "
        f"PowerSGD {found['PowerSGD, rank 1']['exchange_ms']:,.0f}",
        f"{bound:.0f}",
    ]


def test_embeddings() -> None:
    found = rows("embedding-131072-4-hosts-1gbit", "embedding")
    ours = found["columns, 2D"]
    assert TABLE["a step of an LSTM, 131,072 embeddings, 4 hosts"][:3] == [
        f"{ours['step_ms']:,.0f}",
        f"TorchRec {found['TorchRec, columns']['step_ms']:,.0f}, "
        f"DDP `sparse=True` {found['DDP, sparse=True']['step_ms']:,.0f}",
        f"{1e3 * ours['sent_mb'] * 1e6 / NIC:.0f}",
    ]
