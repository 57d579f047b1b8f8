"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo  # optimizers and DDP import it: here once, not in every forked rank
from gpu_ranks import Machine, Numbered, gpus
from host_gpu import HostDevice

from linkweave.collectives.launch import processes

LAST = ("test_event_graphs.py", "test_fake_cuda.py", "test_fake_training.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Backward passes of fake GPU tensors come last: a CUDA build of torch starts a thread for the
    GPU, after which it refuses backward passes in processes forked from this one."""
    items.sort(key=lambda item: item.path.name in LAST)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """GPUs made of threads; nothing of theirs is left afterwards. Its parameter: `one_queue`, or
    what makes a GPU."""
    param = getattr(request, "param", False)
    monkeypatch.setattr(HostDevice, "one_queue", param is True)
    with gpus(monkeypatch, Numbered if isinstance(param, bool) else param) as made:
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that another one's failure leaves are not killed before they have written it down."""
    monkeypatch.setattr(processes, "GRACE", 100.0)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch and the kernels use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
