"""What holds for all tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

from linkweave.collectives.calls import plans


def pytest_configure(config: pytest.Config) -> None:
    """`make test` draws the same examples each time; all tests draw others. A busy machine may take
    long for one."""
    quick = config.getoption("markexpr") == "not slow"
    settings.register_profile("ours", deadline=None, derandomize=quick)
    settings.load_profile("ours")


@pytest.fixture(autouse=True, scope="session")
def plans_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test depends on plans that the user's other processes have kept."""
    folder: Path = tmp_path_factory.mktemp("plans")
    plans._folder = lambda: folder  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="module")
def garbage_of_its_own() -> None:
    """Tests collect garbage, also in forked ranks: not in all that earlier files have left."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true",
        help="write the files of tests/golden anew, instead of comparing with them",
    )  # fmt: skip


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
