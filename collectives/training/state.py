"""Where training is in a step."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """IDLE: gradients are averaged, or there are none. BACKWARD: a backward pass runs. SENDING: it
    is over, and gradients are under way. PENDING: so they are, and `step` has been called: each
    unit is updated before its next use. ABORTED: an error has ended the training."""

    IDLE = "idle"
    BACKWARD = "in a backward pass"
    SENDING = "sending"
    PENDING = "pending"
    ABORTED = "aborted"
