"""One policy a file: a function of (profile, network) that gives a Schedule."""

from collections.abc import Callable

from collectives.overlap.policies.asc_wfbp import asc_wfbp
from collectives.overlap.policies.bytescheduler import bytescheduler
from collectives.overlap.policies.c_cube import c_cube
from collectives.overlap.policies.fusion_dp import fusion_dp
from collectives.overlap.policies.mg_wfbp import mg_wfbp
from collectives.overlap.policies.us_byte import us_byte
from collectives.overlap.policies.wfbp import wfbp
from collectives.overlap.schedule import Schedule

NAMED: dict[str, Callable[..., Schedule]] = {
    "wfbp": wfbp, "mg-wfbp": mg_wfbp, "asc-wfbp": asc_wfbp, "bytescheduler": bytescheduler,
    "us-byte": us_byte, "c-cube": c_cube, "fusion-dp": fusion_dp,
}  # fmt: skip
"""Those that need no time limit."""
