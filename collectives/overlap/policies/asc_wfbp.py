"""ASC-WFBP: sends gradients alone, merged, or simultaneously with earlier ones."""

from __future__ import annotations

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.communication import MAX_LANES, Communication, whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.checks import integer

NORMAL, MERGED, SIMULTANEOUS = "normal", "merged", "simultaneous"
RULES = ("paper", "program")


def asc_wfbp(profile: Profile, network: Network, ways: int = 2, rule: str = "paper") -> Schedule:
    """Return the schedule of ASC-WFBP.

    With rule="paper", algorithm 1 decides the type of each layer. With rule="program", the authors'
    published program does (dear_pytorch, `--asc`), which has neither simultaneous layers nor gamma:
    a gradient waits for the next one only if that is ready before its own all-reduce could begin on
    a single channel; what is sent then takes turns on the lanes, and waits for nothing else.

    A merged layer is sent with the next one. A normal communication waits for all earlier ones, a
    simultaneous one only for those on its lane; `ways` lanes take turns (the paper has two;
    `overlap.network` defines the contention of more). The types follow the paper's predictions, the
    times of the schedule follow `overlap.timeline`. Raises CollectiveError.
    """
    ways = integer(ways, "ways", 1, MAX_LANES)
    if rule not in RULES:
        raise CollectiveError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    if rule == "program":
        return Schedule("asc-wfbp", profile, network, tuple(_program(profile, network, ways)))
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


def _program(profile: Profile, network: Network, ways: int) -> list[Communication]:
    sends: list[Communication] = []
    gathered: list[int] = []
    free = 0.0
    for i in reversed(range(len(profile.layers))):
        gathered.append(i)
        start = max(free, profile.ready[i])
        if i and profile.ready[i - 1] < start:
            continue
        sends.append(whole(profile, tuple(gathered), lane=len(sends) % ways))
        free = start + network.seconds(sum(profile.layers[j].nbytes for j in gathered))
        gathered = []
    return sends


def layer_types(profile: Profile, network: Network) -> list[str]:
    """Return the type of each layer, in forward order, by algorithm 1 (equation 40, with Q1 to Q3
    from equations 21, 24 and 27).

    Where the paper is ambiguous or inconsistent, this implementation does the following. Line 8
    uses the end of layer l - 1's backward pass, as equation 21 does, not tau_b[l] + t_b[l - 1].
    Line 12 omits the term t_b[l], because tau_c[l] is already the end of that pass (line 34,
    equation 17). Line 30 clears m[l + 1] where that was merged, so that the penalty of lines 12 and
    35 would be 0: here it is that of the communication before. A normal layer starts when the
    channel is free (definition 1), which line 26 omits. A simultaneous layer starts at once with
    all that it carries (definition 3, line 34). The bytes of a merged layer count once, although
    line 29 adds them at each call. A penalty is not negative. Layer 1, the last in the backward
    pass, is simultaneous (line 18).
    """
    a, b, gamma = network.startup_s, network.seconds_per_byte, network.gamma
    last = len(profile.layers) - 1
    types = [NORMAL] * (last + 1)
    ready = profile.ready  # tau_b + t_b
    start, size, busy = 0.0, 0, 0.0  # tau_c, bytes and end of the previous communication
    gathered = 0  # bytes of merged layers that wait for this one
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
