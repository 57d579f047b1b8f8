"""MG-WFBP: merges gradients if waiting for the next one costs less than a start-up."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def mg_wfbp(profile: Profile, network: Network) -> Schedule:
    """Return the schedule of the merge rule in ASC-WFBP, section II-C, equation 5.

    Gradients merged so far would start at tau_c = max(ready, channel free). The next gradient joins
    them if it is ready before tau_c + a (equation 5). The rule looks only one layer ahead, so if a
    start-up takes longer than the backward pass of each layer, all layers are merged.
    """
    merged: list[list[int]] = []
    gathered: list[int] = []
    free = 0.0
    for i in reversed(range(len(profile.layers))):
        gathered.append(i)
        start = max(free, profile.ready[i])
        if i > 0 and profile.ready[i - 1] < start + network.startup_s:
            continue
        merged.append(gathered)
        free = start + network.seconds(sum(profile.layers[j].nbytes for j in gathered))
        gathered = []
    return Schedule("mg-wfbp", profile, network, tuple(whole(profile, tuple(m)) for m in merged))
