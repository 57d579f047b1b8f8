"""Which policy: by name, or the one that is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.policies import NAMED
from linkweave.collectives.overlap.policies.carlier import carlier
from linkweave.collectives.overlap.policies.optimal import optimal
from linkweave.collectives.overlap.profile import Profile, shown
from linkweave.collectives.overlap.schedule import Schedule

POLICIES: dict[str, Callable[..., Schedule]] = {
    **NAMED, "carlier": carlier, "optimal": optimal,
}  # fmt: skip
AUTO_LIMIT_S = 3.0


def plan(profile: Profile, network: Network, policy: str = "auto", **options: Any) -> Schedule:
    """The schedule of a policy, whose own options may follow.

    "auto" takes what is predicted to be the fastest; as "optimal" starts from all named policies,
    it is never slower than any of them (than "carlier" within its share of the time). Raises
    CollectiveError.
    """
    if policy == "auto":
        best = optimal(profile, network, options.pop("limit_s", AUTO_LIMIT_S))
        refuse(options, "auto")
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


def refuse(options: dict[str, Any], policy: str) -> None:
    if options:
        raise CollectiveError(f"{policy} has no option {', '.join(options)}")
