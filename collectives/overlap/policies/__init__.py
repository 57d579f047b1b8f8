"""Scheduling policies, one in each file: functions of (profile, network) that return a Schedule.

A new policy needs its file and an entry in `NAMED`.
"""

from collections.abc import Callable

from linkweave.collectives.overlap.policies.asc_wfbp import asc_wfbp
from linkweave.collectives.overlap.policies.bytescheduler import bytescheduler
from linkweave.collectives.overlap.policies.c_cube import c_cube
from linkweave.collectives.overlap.policies.ddp import ddp
from linkweave.collectives.overlap.policies.dear import dear
from linkweave.collectives.overlap.policies.fusion_dp import fusion_dp
from linkweave.collectives.overlap.policies.mg_wfbp import mg_wfbp
from linkweave.collectives.overlap.policies.us_byte import us_byte
from linkweave.collectives.overlap.policies.wfbp import wfbp
from linkweave.collectives.overlap.schedule import Schedule

NAMED: dict[str, Callable[..., Schedule]] = {
    "ddp": ddp, "wfbp": wfbp, "mg-wfbp": mg_wfbp, "asc-wfbp": asc_wfbp,
    "bytescheduler": bytescheduler, "us-byte": us_byte, "c-cube": c_cube, "fusion-dp": fusion_dp,
    "dear": dear,
}  # fmt: skip
"""The policies that need no time limit; `carlier` and `optimal` search within one."""
