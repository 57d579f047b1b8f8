"""DeAR: reduce-scatters beside the backward pass, all-gathers beside the next forward pass."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import (
    ALL_GATHER,
    REDUCE_SCATTER,
    partition_of,
    whole,
)
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.text import counted

PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Into about how many buckets all gradients are divided, unless the caller says how large they
are."""


def dear(profile: Profile, network: Network, bucket: int | None = None) -> Schedule:
    """Return the schedule of DeAR (Zhang et al. 2023, arXiv 2302.12445).

    Neighbouring layers, in the order of the forward pass, fill buckets of at most `bucket` bytes;
    a larger layer has one of its own. A bucket is scattered once its gradients are there, the last
    layer's first. All-gathers follow in the order of the forward pass, in which each layer waits
    for its own. Without a `bucket`, the best of PARTS by prediction; the paper's program tries
    sizes on the machine, by Bayesian optimization. Raises CollectiveError.
    """
    if bucket is not None:
        return _by(profile, network, partition_of(bucket))
    made = [_by(profile, network, -(-profile.nbytes // parts)) for parts in PARTS]
    return min(made, key=lambda schedule: schedule.predicted_seconds)


def _by(profile: Profile, network: Network, bucket: int) -> Schedule:
    buckets: list[list[int]] = [[]]
    size = 0  # of the bucket that is being filled
    for i, layer in enumerate(profile.layers):
        if size and size + layer.nbytes > bucket:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += layer.nbytes
    sends = tuple(
        whole(profile, tuple(layers), kind=kind)
        for kind, order in ((REDUCE_SCATTER, reversed(buckets)), (ALL_GATHER, iter(buckets)))
        for layers in order
    )
    note = counted(len(buckets), "bucket")
    return Schedule("dear", profile, network, sends, True, note)
