"""TorchRec's table with columns divided among ranks, for `linkweave bench embedding`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Table(nn.Module):
    """Rows of a table by TorchRec, whose optimizer is part of it: SGD."""

    def __init__(self, rows: int, width: int, rate: float) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        super().__init__()
        config = EmbeddingConfig(
            name="table", num_embeddings=rows, embedding_dim=width, feature_names=["words"],
            init_fn=nn.init.normal_,
        )  # fmt: skip
        self._width = width
        self.tables: Any = EmbeddingCollection(tables=[config], device=torch.device("cpu"))
        apply_optimizer_in_backward(torch.optim.SGD, self.tables.parameters(), {"lr": rate})

    def forward(self, x: Tensor) -> Tensor:
        from torchrec import KeyedJaggedTensor

        lengths = torch.full((x.shape[0],), x.shape[1])
        keyed = KeyedJaggedTensor(["words"], x.flatten(), lengths=lengths)
        values: Tensor = self.tables(keyed)["words"].values()
        return values.view(*x.shape, self._width)


def divided(model: nn.Module, width: int) -> Any:
    """The model, trained by all ranks of the default process group: DDP, but for its `Table`."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import ShardingType

    size = dist.get_world_size()
    columns = ParameterConstraints(
        sharding_types=[ShardingType.COLUMN_WISE.value], min_partition=width // size
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu"), constraints={"table": columns}
    )
    sharders: Any = [EmbeddingCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
