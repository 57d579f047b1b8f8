"""The best contiguous fusion, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def fusion_dp(profile: Profile, network: Network) -> Schedule:
    """Groups of neighbours in the order of the backward pass, such that the last all-reduce ends as
    early as possible; nothing is chained. What MG-WFBP's rule approximates.

    F[j] = min over i < j of max(F[i], ready of the j-th) + a + b (bytes of the (i+1)-th to the
    j-th), in O(L^2).
    """
    _, before = earliest_ends(profile, network)
    last = len(profile.layers)
    groups: list[tuple[int, ...]] = []
    j = last
    while j:
        i = int(before[j])
        groups.append(tuple(last - 1 - k for k in range(i, j)))
        j = i
    sends = tuple(whole(profile, group) for group in reversed(groups))
    return Schedule("fusion-dp", profile, network, sends)


def earliest_ends(
    profile: Profile, network: Network
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(F, i of the last group of each j), j layers from the last one on; F[0] = 0."""
    sizes = np.array([layer.nbytes for layer in reversed(profile.layers)], np.float64)
    ready = np.array(profile.ready[::-1])
    upto = np.concatenate([[0.0], np.cumsum(sizes)])
    ends, before = np.zeros(sizes.size + 1), np.zeros(sizes.size + 1, np.int64)
    for j in range(1, sizes.size + 1):
        trial = np.maximum(ends[:j], ready[j - 1]) - network.seconds_per_byte * upto[:j]
        before[j] = int(np.argmin(trial))
        ends[j] = trial[before[j]] + network.startup_s + network.seconds_per_byte * upto[j]
    return ends, before
