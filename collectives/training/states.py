"""Where training is in a step: the states of an engine, what moves it from one to another, and what
it does then."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What the gradients of a rank are."""

    IDLE = "no backward pass has been averaged"
    LOCAL = "gradients of this rank have been added, and not averaged"
    UNREACHED = "the last backward pass has reached no parameter"
    BACKWARD = "in a backward pass, before its first gradient"
    COLLECTING = "in a backward pass that has accumulated gradients"
    SENDING = "gradients are under way"
    AVERAGED = "gradients are averages"
    PENDING = "step() has been called: each unit is updated before its next use"
    FAILED = "an error has ended the training"
    CLOSED = "closed"


FINAL = (State.IDLE, State.LOCAL, State.UNREACHED, State.AVERAGED)
"""In these states nothing is under way, and parameters are final."""


class Event(Enum):
    """What the training loop, PyTorch's hooks and the end of a wait tell the engine."""

    ENTER = "a backward pass begins"
    GRADIENT = "its first gradient has been accumulated"
    KEPT = "it has ended, and is not to send"
    SENT = "it has ended, and all its gradients are on their way"
    EMPTY = "it has ended without a gradient"
    SYNCHRONIZE = "gradients are to be averages"
    STEP = "the optimizer steps"
    FINISH = "parameters are to be final"


S, E = State, Event
TABLE: dict[tuple[State, Event], tuple[str, State]] = {
    (S.IDLE, E.ENTER): ("", S.BACKWARD),
    (S.LOCAL, E.ENTER): ("", S.BACKWARD),
    (S.UNREACHED, E.ENTER): ("", S.BACKWARD),
    (S.AVERAGED, E.ENTER): ("", S.BACKWARD),
    (S.SENDING, E.ENTER): ("arrive", S.BACKWARD),
    (S.PENDING, E.ENTER): ("update", S.BACKWARD),
    (S.BACKWARD, E.GRADIENT): ("begin", S.COLLECTING),
    (S.BACKWARD, E.EMPTY): ("", S.UNREACHED),
    (S.COLLECTING, E.KEPT): ("", S.LOCAL),
    (S.COLLECTING, E.SENT): ("", S.SENDING),
    (S.SENDING, E.SYNCHRONIZE): ("arrive", S.AVERAGED),
    (S.SENDING, E.STEP): ("defer", S.PENDING),
    (S.SENDING, E.FINISH): ("arrive", S.AVERAGED),
    (S.PENDING, E.STEP): ("update", S.AVERAGED),
    (S.PENDING, E.FINISH): ("update", S.AVERAGED),
    (S.AVERAGED, E.FINISH): ("drain", S.AVERAGED),
    (S.IDLE, E.STEP): ("compare", S.IDLE),
    (S.LOCAL, E.STEP): ("compare", S.LOCAL),
    (S.UNREACHED, E.STEP): ("refuse", S.UNREACHED),
    **{
        (state, event): ("broken", S.FAILED)
        for state in (S.BACKWARD, S.COLLECTING) for event in (E.SYNCHRONIZE, E.STEP, E.FINISH)
    },
    **{(S.FAILED, event): ("failed", S.FAILED) for event in (E.SYNCHRONIZE, E.STEP, E.FINISH)},
}  # fmt: skip
"""(state, event): the method of `Engine` that is called, and the state after it. Events that are
not listed for a state change nothing."""
