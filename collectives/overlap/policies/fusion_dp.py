"""The optimal fusion of neighbouring gradients, by dynamic programming."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def fusion_dp(profile: Profile, network: Network) -> Schedule:
    """Return the fusion of neighbours whose last all-reduce ends earliest, without chaining.

    MG-WFBP's rule approximates it. With layers in the order of the backward pass, F[j] = min over
    i < j of max(F[i], ready[j]) + a + b (bytes of layers i + 1 to j), in O(L^2) steps.
    """
    _, before = earliest_ends(profile, network)
    last = len(profile.layers)
    fused: list[tuple[int, ...]] = []
    j = last
    while j:
        i = int(before[j])
        fused.append(tuple(last - 1 - k for k in range(i, j)))
        j = i
    sends = tuple(whole(profile, layers) for layers in reversed(fused))
    return Schedule("fusion-dp", profile, network, sends)


def earliest_ends(
    profile: Profile, network: Network
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return F, with F[0] = 0, and the i that attains each minimum."""
    sizes = np.array([layer.nbytes for layer in reversed(profile.layers)], np.float64)
    ready = np.array(profile.ready[::-1])
    upto = np.concatenate([[0.0], np.cumsum(sizes)])
    ends, before = np.zeros(sizes.size + 1), np.zeros(sizes.size + 1, np.int64)
    for j in range(1, sizes.size + 1):
        trial = np.maximum(ends[:j], ready[j - 1]) - network.seconds_per_byte * upto[:j]
        before[j] = int(np.argmin(trial))
        ends[j] = trial[before[j]] + network.startup_s + network.seconds_per_byte * upto[j]
    return ends, before
