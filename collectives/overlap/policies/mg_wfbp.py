"""MG-WFBP: gradients are merged where waiting for the next one costs less than a start-up."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def mg_wfbp(profile: Profile, network: Network) -> Schedule:
    """ASC-WFBP, section II-C, equation 5, from the last layer to the first.

    What has been gathered would start at tau_c = max(it is there, the channel is free); where the
    next gradient is there before tau_c + a (equation 5), it joins. The rule looks one layer ahead:
    where a start-up lasts longer than each layer's backward pass all layers become one.
    """
    groups: list[list[int]] = []
    gathered: list[int] = []
    free = 0.0
    for i in reversed(range(len(profile.layers))):
        gathered.append(i)
        start = max(free, profile.ready[i])  # tau_c of what is gathered
        if i > 0 and profile.ready[i - 1] < start + network.startup_s:
            continue
        groups.append(gathered)
        free = start + network.seconds(sum(profile.layers[j].nbytes for j in gathered))
        gathered = []
    return Schedule("mg-wfbp", profile, network, tuple(whole(profile, tuple(g)) for g in groups))
