"""C-Cube: one all-reduce of all gradients, whose chunks arrive in the order of the forward pass."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


def c_cube(profile: Profile, network: Network) -> Schedule:
    """Return one all-reduce after the backward pass, chained with the next forward pass.

    A gradient queue lets layer l compute once its last chunk has arrived (C-Cube, sections II-C and
    III-D, figure 8). Chunks are assumed small compared with layers.
    """
    sends = whole(profile, tuple(range(len(profile.layers))), streamed=True)
    return Schedule("c-cube", profile, network, (sends,), chained=True)
