"""Planned schedules of gradient communication that overlap with computation."""

from linkweave.collectives.overlap.choose import POLICIES, plan
from linkweave.collectives.overlap.communication import Communication, Piece
from linkweave.collectives.overlap.embedding_times import (
    EmbeddingExplanation,
    Way,
    embedding_ways,
    explain_embedding,
)
from linkweave.collectives.overlap.measure import measure
from linkweave.collectives.overlap.measured import MeasuredStep
from linkweave.collectives.overlap.network import PRESETS, Fit, Network, fit, network, network_from
from linkweave.collectives.overlap.profile import Layer, Profile, load, model, model_at, models
from linkweave.collectives.overlap.schedule import Schedule, lower_bound
from linkweave.collectives.overlap.timeline import StepTimeline
from linkweave.collectives.overlap.timing import Timing

__all__ = [
    "POLICIES", "PRESETS", "Communication", "EmbeddingExplanation", "Fit", "Layer", "MeasuredStep",
    "Network", "Piece", "Profile", "Schedule", "StepTimeline", "Timing", "Way", "embedding_ways",
    "explain_embedding", "fit", "load", "lower_bound", "measure", "model", "model_at", "models",
    "network", "network_from", "plan",
]  # fmt: skip
