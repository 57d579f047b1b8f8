"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_ranks import Machine, gpus


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """GPUs made of threads; nothing of theirs is left afterwards."""
    with gpus(monkeypatch) as made:
        yield made
