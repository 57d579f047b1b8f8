"""WFBP: sends each gradient alone, once it is ready and the previous one has been sent."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def wfbp(profile: Profile, network: Network) -> Schedule:
    """Return the schedule of wait-free backpropagation (ASC-WFBP, section II-B, equation 4)."""
    sends = tuple(whole(profile, (i,)) for i in reversed(range(len(profile.layers))))
    return Schedule("wfbp", profile, network, sends)
