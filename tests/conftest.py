"""What holds for all tests."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """`make test` draws the same examples each time; all tests draw others. A busy machine may take
    long for one."""
    quick = config.getoption("markexpr") == "not slow"
    settings.register_profile("ours", deadline=None, derandomize=quick)
    settings.load_profile("ours")


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
