"""C-Cube: one all-reduce of everything, whose chunks arrive in the order of the forward pass."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def c_cube(profile: Profile, network: Network) -> Schedule:
    """One-shot all-reduce behind the backward pass, chained with the next forward pass by a
    gradient queue (C-Cube, sections II-C and III-D, figure 8): layer l computes when its last chunk
    has arrived. Chunks are taken to be small beside layers."""
    sends = whole(profile, tuple(range(len(profile.layers))), streamed=True)
    return Schedule("c-cube", profile, network, (sends,), chained=True)
