"""Tests whose body runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any

import pytest

from linkweave import collectives


def on_ranks(
    *sizes: Any, timeout: float = 60, params: Sequence[str] = (),
    modes: dict[str, Any] | None = None, **settings: Any,
) -> Callable[[Any], Any]:  # fmt: skip
    """Makes `body(rank, ...)` a test that spawns so many ranks of it, and one test for each of
    several sizes. The body's other parameters are those of the test; `size` is the number of ranks.

    settings: those of `spawn`.
    params: settings that are parameters of the test; the sizes are so as well where none is given.
    modes: further settings by name, with a test for each; the name is the parameter `mode`.
    """

    def make(body: Any) -> Any:
        def run(given: dict[str, Any], values: dict[str, Any]) -> None:
            more = settings | {name: given[name] for name in params}
            more |= modes[given["mode"]] if modes else {}
            where = body.__module__, body.__name__, values
            collectives.spawn(_run, given["size"], args=where, **({"timeout": timeout} | more))

        test = as_test(body, run, "size", *params, *(["mode"] if modes else []))
        test = pytest.mark.parametrize("size", sizes)(test) if sizes else test
        return pytest.mark.parametrize("mode", modes)(test) if modes else test

    return make


def as_test(body: Any, run: Callable[[dict[str, Any], dict[str, Any]], None], *names: str) -> Any:
    """A test with parameters of these names and all of the body's but the first. It calls `run`
    with them, and with those that the body has."""
    own = [*signature(body).parameters][1:]

    @wraps(body)
    def test(**given: Any) -> None:
        run(given, {name: given[name] for name in own})

    every = dict.fromkeys([*own, *names])
    test.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.KEYWORD_ONLY) for name in every]
    )
    return test


def _run(rank: int, module: str, name: str, values: dict[str, Any]) -> None:
    """Finds the body by name: ranks that are not forked cannot unpickle what a test replaces."""
    getattr(import_module(module), name).__wrapped__(rank, **values)
