"""When to send what: schedules of gradient communication against computation, planned."""

from collectives.overlap.bounds import lower_bound
from collectives.overlap.choose import POLICIES, plan
from collectives.overlap.network import PRESETS, Fit, Network, fit, network
from collectives.overlap.profile import Layer, Profile, load, model, models
from collectives.overlap.schedule import Communication, Piece, Schedule
from collectives.overlap.timeline import Timeline

__all__ = [
    "POLICIES", "PRESETS", "Communication", "Fit", "Layer", "Network", "Piece", "Profile",
    "Schedule", "Timeline", "fit", "load", "lower_bound", "model", "models", "network", "plan",
]  # fmt: skip
