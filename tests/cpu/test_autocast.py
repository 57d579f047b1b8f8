"""Training under bfloat16 autocast: dense gradients, gTop-k and an embedding. Two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from linkweave import DataParallel, GTopK, ShardedEmbedding, collectives, prefetch

WORDS, STEPS = 30, 60


def trained(rank: int, exchange: Any) -> tuple[float, float, list[float]]:
    """(the first loss, the last ones' mean, the parameters of this rank)."""
    torch.manual_seed(0)
    table = ShardedEmbedding(WORDS, 8)
    head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WORDS))
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.02),
                  torch.optim.SGD(head.parameters(), 0.3, momentum=0.9)]  # fmt: skip
    model = DataParallel(
        nn.ModuleList([table, head]), optimizers, schedule="wfbp", exchange=exchange
    )
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(WORDS, (64,), generator=generator) for _ in range(STEPS)]
    losses = []
    for ids in prefetch(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(table(ids))
            assert logits.dtype == torch.bfloat16
            loss = functional.cross_entropy(logits.float(), (ids + 1) % WORDS)
        loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in head.parameters())
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    model.finish()
    found = [float(x) for p in (*head.parameters(), table.whole(table.weight)) for x in p.flatten()]
    model.close()
    table.close()
    return losses[0], sum(losses[-5:]) / 5, found


@pytest.mark.parametrize("exchange", ["dense", GTopK(0.2, mode="gtopk"), GTopK(0.2, mode="topk")])
def test_bfloat16_autocast(exchange: Any) -> None:
    rows = collectives.spawn(trained, 2, args=(exchange,), timeout=100)
    assert rows[0][2] == rows[1][2]
    for first, last, _ in rows:
        assert last < first / 3
