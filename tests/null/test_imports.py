"""Every module can be imported, also those that only a command imports when it runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(("linkweave", *path.relative_to(ROOT).with_suffix("").parts))
    for room in ("bench", "collectives", "kernels", "topology")
    for path in (ROOT / room).rglob("*.py")
    if path.name != "mpi_rank.py"  # which starts MPI
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name.removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith("linkweave")
        pytest.skip(f"needs {error.name}")
