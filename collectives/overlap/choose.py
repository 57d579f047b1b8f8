"""The choice of a policy: by name, or the one predicted to be the fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.policies import NAMED, Policy
from linkweave.collectives.overlap.policies.optimal import optimal
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.checks import shown

POLICIES = NAMED | {"optimal": Policy(optimal, chains=True)}
AUTO_LIMIT_S = 3.0


def plan(profile: Profile, network: Network, policy: str = "auto", **options: Any) -> Schedule:
    """Return the schedule of a policy, which receives the `options`.

    "auto" returns the best of all policies within a time limit (`limit_s`, in seconds). It is never
    slower than a named policy, as it starts from all of them.
    Raises CollectiveError for an unknown policy or option.
    """
    if policy == "auto":
        best = optimal(profile, network, options.pop("limit_s", AUTO_LIMIT_S))
        if options:
            raise CollectiveError(f"auto has no option {', '.join(options)}")
        return replace(best, policy="auto")
    if policy not in POLICIES:
        known = ", ".join(["auto", *POLICIES])
        raise CollectiveError(f"unknown policy {shown(policy)}; choose from {known}")
    try:
        return POLICIES[policy](profile, network, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise CollectiveError(f"{policy}: {error}") from None
