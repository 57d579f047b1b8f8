"""Which transport a group gets, by the kind of device on which the parameters are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed.engine import CudaEngine
from linkweave.collectives.distributed.group import Group
from linkweave.collectives.distributed.unlisted import Unlisted
from linkweave.collectives.training import transport as transports
from linkweave.collectives.training.lanes import lanes_of
from linkweave.collectives.training.transport import OverGroup, transport_of


def group_of(engine: CudaEngine, size: int = 2, other: str = "") -> Any:
    """A group of linkweave whose other rank has parameters on the kind of device `other`."""
    made: Any = Group.__new__(Group)
    torch.distributed.ProcessGroup.__init__(made, 0, size)

    def allgather(x: torch.Tensor) -> torch.Tensor:
        told = torch.tensor([ord(letter) for letter in f"{other:8}"]) if other else x
        return torch.stack([x, told])

    state = {"communicator": SimpleNamespace(allgather=allgather), "engine": engine}
    vars(made).update(state)
    return made


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OverGroup", "OverCommunicator"):
        kind: Any = lambda over, name=name: SimpleNamespace(name=name, over=over)  # noqa: E731
        monkeypatch.setattr(transports, name, kind)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())


@pytest.mark.parametrize(
    ("device", "every", "name"),
    [("cpu", False, "OverCommunicator"), ("cuda", False, "OverGroup"),
     ("cuda", True, "OverCommunicator"), ("cuda", None, "OverGroup")],
)  # fmt: skip
def test_a_group_of_linkweave(device: str, every: bool | None, name: str) -> None:
    group = group_of(CudaEngine(every, "asked for"))
    made: Any = transport_of(group, device)
    assert (made.name, made.device) == (name, device)
    assert made.over is (group if name == "OverGroup" else group.communicator)
    assert transport_of(group_of(CudaEngine(every, ""), size=1), device) is None


def test_ranks_with_other_devices_are_told() -> None:
    with pytest.raises(CollectiveError, match="different devices; mine: cuda"):
        transport_of(group_of(CudaEngine(True, ""), other="cpu"), "cuda")


def test_parameters_that_have_moved_are_refused() -> None:
    made: Any = transport_of(group_of(CudaEngine(False, "")), "cuda")
    gradients: Any = SimpleNamespace(units=[SimpleNamespace(device=torch.device("cpu"))])
    nothing: Any = None
    with pytest.raises(CollectiveError, match=r"are on cpu; when they were passed .* on cuda"):
        lanes_of(made, gradients, nothing, nothing, nothing)


def unlisted(**of: Any) -> Any:
    made: Any = Unlisted.__new__(Unlisted)
    made._of, made._ended = of, False
    return made


def test_gloo_is_refused_for_messages_of_gpu_tensors() -> None:
    made: Any = OverGroup.__new__(OverGroup)
    made._own = unlisted(cpu=None)
    made.rank, made._lanes = 0, [None]
    x: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    for call in (lambda: made.pairwise(0, x, [(0, 1)]), lambda: made.alltoall(0, x, [[1, 1]] * 2)):
        with pytest.raises(CollectiveError, match=r"need a group of NCCL, .* not one of gloo"):
            call()
