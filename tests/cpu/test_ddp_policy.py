"""The policy `ddp` against torch's own buckets."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Layer, Network, Profile
from linkweave.collectives.overlap.policies.ddp import BUCKET, FIRST, ddp


def buckets(sizes: list[int], bucket: int | None = None) -> list[list[int]]:
    """The layers of each bucket, for gradients of so many bytes in forward order."""
    made = ddp(Profile(tuple(Layer("", n, 0.0, 1.0) for n in sizes)), Network(0, 0), bucket)
    assert made.lanes == 1 and not made.chained and not any(c.after for c in made.communications)
    return [[piece.layer for piece in c.pieces] for c in made.communications]


@pytest.mark.parametrize("bucket", [None, 1, 1000, 3 << 20])
def test_buckets_are_torchs(bucket: int | None) -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST
    limits = [FIRST, BUCKET] if bucket is None else [bucket]
    for seed in range(100):
        rng = random.Random(seed)
        exact = [4, *limits, *(n // 2 for n in limits), max(limits) - limits[0]]
        sizes = [
            max(4, rng.choice([*exact, rng.randint(1, 1 << 22), rng.randint(1, 1 << 25)]) // 4 * 4)
            for _ in range(rng.randint(1, 40))
        ]
        arriving = range(len(sizes) - 1, -1, -1)  # the order of the backward pass
        gradients = [torch.empty(sizes[i] // 4, device="meta") for i in arriving]
        want, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
        assert buckets(sizes, bucket) == [[arriving[i] for i in of] for of in want], seed


@pytest.mark.parametrize("bucket", [None, 1])
def test_buckets_are_those_of_a_model_in_training(bucket: int | None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        widths = [30, 300, 5000, 1500, 400, 8]
        model = torch.nn.Sequential(
            *(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        )
        given = {} if bucket is None else {"bucket_cap_mb": bucket}
        trained = torch.nn.parallel.DistributedDataParallel(model, **given)
        for _ in range(3):  # the first step finds the order, the third logs the buckets
            trained(torch.ones(1, widths[0])).sum().backward()
        told = trained._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        want = [[int(i) for i in of.split()] for of in told.split(", ")]
    finally:
        dist.destroy_process_group()
    sizes = [p.nbytes for p in model.parameters()]
    assert buckets(sizes, bucket and bucket << 20) == want and len(want) > 2


def test_a_bucket_of_no_bytes_is_refused() -> None:
    profile, network = overlap.model("vgg16"), overlap.network("10GbE")
    with pytest.raises(CollectiveError, match="bucket must be an integer from 1 to"):
        overlap.plan(profile, network, "ddp", bucket=0)
