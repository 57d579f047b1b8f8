"""Scheduling policies, one in each file: functions of (profile, network) that return a Schedule.

A new policy needs its file and an entry in `NAMED`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.policies.asc_wfbp import asc_wfbp
from linkweave.collectives.overlap.policies.bytescheduler import bytescheduler
from linkweave.collectives.overlap.policies.c_cube import c_cube
from linkweave.collectives.overlap.policies.ddp import ddp
from linkweave.collectives.overlap.policies.dear import dear
from linkweave.collectives.overlap.policies.fusion_dp import fusion_dp
from linkweave.collectives.overlap.policies.mg_wfbp import mg_wfbp
from linkweave.collectives.overlap.policies.us_byte import us_byte
from linkweave.collectives.overlap.policies.wfbp import wfbp
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as users name it: `plan(profile, network, ...)` returns its schedule."""

    plan: Callable[..., Schedule]
    chains: bool = False
    """Whether each unit is updated just before its next use, by the policy's nature."""
    whole: bool = False
    """Whether it sends layers whole, with their neighbours, as GTopK needs."""

    def __call__(self, profile: Profile, network: Network, **options: Any) -> Schedule:
        return self.plan(profile, network, **options)


NAMED = {
    "ddp": Policy(ddp, whole=True), "wfbp": Policy(wfbp, whole=True),
    "mg-wfbp": Policy(mg_wfbp, whole=True), "asc-wfbp": Policy(asc_wfbp, whole=True),
    "bytescheduler": Policy(bytescheduler, chains=True), "us-byte": Policy(us_byte, chains=True),
    "c-cube": Policy(c_cube, chains=True), "fusion-dp": Policy(fusion_dp),
    "dear": Policy(dear, chains=True),
}  # fmt: skip
"""The policies that need no time limit; `optimal` searches within one."""
