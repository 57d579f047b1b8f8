"""WFBP: each gradient is sent alone, when it is there and the one before has been sent."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def wfbp(profile: Profile, network: Network) -> Schedule:
    """Wait-free backpropagation (ASC-WFBP, section II-B, equation 4). Nothing is chained."""
    sends = tuple(whole(profile, (i,)) for i in reversed(range(len(profile.layers))))
    return Schedule("wfbp", profile, network, sends)
