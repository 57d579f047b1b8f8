"""ASC-WFBP: gradients are sent alone, merged, or at once with the ones before."""

from __future__ import annotations

from linkweave.collectives.overlap.communication import MAX_LANES, Communication, whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile, check_count
from linkweave.collectives.overlap.schedule import Schedule

NORMAL, MERGED, SIMULTANEOUS = "normal", "merged", "simultaneous"


def asc_wfbp(profile: Profile, network: Network, ways: int = 2) -> Schedule:
    """Algorithm 1 decides each layer's type; layers that are merged travel with the next one.

    A normal communication waits for all before it, a simultaneous one for none but those on its
    lane: `ways` lanes are taken in turn (the paper has two, and leaves more open; the contention
    of more is that of `overlap.network`). What the types predict is the paper's; what the schedule
    takes is the timeline's. Raises CollectiveError.
    """
    check_count("ways", ways, MAX_LANES)
    types = layer_types(profile, network)
    sends: list[Communication] = []
    gathered: list[int] = []
    lane = 0
    for i in reversed(range(len(profile.layers))):
        gathered.append(i)
        if types[i] == MERGED:
            continue
        if types[i] == SIMULTANEOUS and sends:
            lane = (lane + 1) % ways
            after: tuple[int, ...] = ()
        else:
            after = tuple(range(max(0, len(sends) - ways), len(sends)))
        sends.append(whole(profile, tuple(gathered), lane=lane, after=after))
        gathered = []
    return Schedule("asc-wfbp", profile, network, tuple(sends))


def layer_types(profile: Profile, network: Network) -> list[str]:
    """Algorithm 1 (equation 40, Q1 to Q3 by equations 21, 24 and 27), for layers in forward order.

    Decided where the paper is ambiguous or wrong: in line 8 it is tau_b[l] + t_b[l - 1], where
    equation 21 has the end of layer l - 1's backward pass, as here. In line 12 the term t_b[l]
    follows tau_c[l], which line 34 has as the end of that pass already; equation 17 starts from
    tau_b[l] + t_b[l], so it is left out. A normal layer starts when the channel is free
    (definition 1), which line 26 leaves out; a simultaneous one starts at once, whatever it carries
    (definition 3, line 34). A merged one's bytes are counted once, though the procedure's line 29
    adds them again at each call. A penalty cannot be negative. The last layer
    to be computed, layer 1, is simultaneous (line 18).
    """
    a, b, gamma = network.startup_s, network.seconds_per_byte, network.gamma
    last = len(profile.layers) - 1
    types = [NORMAL] * (last + 1)
    ready = profile.ready  # tau_b + t_b
    start, size, busy = 0.0, 0, 0.0  # of the communication before: tau_c, bytes, its end
    gathered = 0  # bytes that wait to travel with this layer
    for i in range(last, 0, -1):
        nbytes = gathered + profile.layers[i].nbytes
        begins = max(ready[i], busy)  # tau_c of a normal layer
        q1 = begins + a + b * nbytes <= ready[i - 1]  # equation 21
        if q1:
            types[i] = NORMAL
        else:
            q2 = ready[i - 1] < begins + a  # equation 24
            alone = a + b * size
            share = 1 - (ready[i] - start) / alone if alone and size else 0.0
            penalty = (gamma - 1) * b * size * max(0.0, share)  # equation 13
            q3 = ready[i] + a + b * nbytes + penalty < ready[i - 1]  # equation 27
            types[i] = MERGED if q2 and not q3 else SIMULTANEOUS
        if types[i] == MERGED:
            gathered = nbytes
            continue
        start = begins if types[i] == NORMAL else ready[i]
        busy = start + a + b * nbytes + (0.0 if types[i] == NORMAL else penalty)
        size, gathered = nbytes, 0
    types[0] = SIMULTANEOUS
    return types
