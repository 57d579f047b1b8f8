"""Which GPU has which links, by its model's name or compute capability."""

from __future__ import annotations

import pytest

from linkweave.topology import speeds

GB = 10**9


@pytest.mark.parametrize(
    ("model", "sm", "nvlink", "pcie"),
    [
        ("Tesla P100-SXM2-16GB", 60, 20, 12),
        ("Tesla V100-SXM2-32GB", 70, 25, 12),
        ("Tesla T4", 75, 25, 12),
        ("NVIDIA A100-SXM4-80GB", 80, 25, 24),
        ("NVIDIA A30", 80, 25, 24),
        ("NVIDIA GeForce RTX 3090", 86, 14.0625, 24),
        ("NVIDIA RTX A6000", 86, 14.0625, 24),
        ("NVIDIA L40S", 89, 14.0625, 24),
        ("NVIDIA GeForce RTX 4090", 89, 14.0625, 24),
        ("NVIDIA H100 80GB HBM3", 90, 25, 48),
        ("NVIDIA GH200 480GB", 90, 25, 48),
        ("NVIDIA H200", 90, 25, 48),
        ("NVIDIA B200", 100, 50, 48),
        ("NVIDIA GB200", 100, 50, 48),
        ("NVIDIA GeForce RTX 5090", 120, 50, 48),
    ],
)
def test_models(model: str, sm: int, nvlink: float, pcie: int) -> None:
    assert speeds.compute_capability(model) == sm
    assert speeds.nvlink(sm) == nvlink * GB
    assert speeds.pcie_port(sm) == pcie * GB


@pytest.mark.parametrize("model", ["Quadro P1000", "NVIDIA RTX 1000", "Radeon", "", "XA1000"])
def test_models_that_only_look_alike(model: str) -> None:
    assert speeds.compute_capability(model) == 0
    assert speeds.pcie_port(0) == speeds.PCIE
