"""DDP: the buckets of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import MAX_BYTES, Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.checks import integer

FIRST = 1 << 20
"""Bytes at which the first bucket is full (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
BUCKET = 25 << 20
"""Bytes at which every later bucket is full (DistributedDataParallel's bucket_cap_mb, in MiB)."""


def ddp(profile: Profile, network: Network, bucket: int | None = None) -> Schedule:
    """Return the schedule of DistributedDataParallel from the second step on, when it has put the
    gradients in the order in which they become ready.

    Whole gradients fill a bucket in the order of the backward pass. The one that reaches or passes
    the limit still joins the bucket, which is then sent. A `bucket`, in bytes, is the limit of all
    buckets, as when the caller sets bucket_cap_mb; without it the first has a smaller one. All
    gradients are taken to have one dtype. Raises CollectiveError.

    Source: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp, 2.13.
    """
    later = BUCKET if bucket is None else integer(bucket, "bucket", 1, MAX_BYTES)
    limit = FIRST if bucket is None else later
    buckets: list[list[int]] = [[]]
    size = 0  # of the bucket that is being filled
    for i in reversed(range(len(profile.layers))):
        if size >= limit:
            buckets.append([])
            size, limit = 0, later
        buckets[-1].append(i)
        size += profile.layers[i].nbytes
    sends = tuple(whole(profile, tuple(layers)) for layers in buckets)
    return Schedule("ddp", profile, network, sends)
