"""Whatever text the readers of foreign forms are given: what is in it, or a CollectiveError, within
a second; what is read of MSCCL++ is written and read again, and proved or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mscclpp_files import FILES
from test_fuzz_readers import QUICK, WORDS, attempt
from test_judge import TAGGED, V100, new, old, written
from test_nccl_graph import CHAINS, RINGS, dump

from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import mscclpp, nccl_graph, nccl_tests, rccl
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.topology import load

LONGEST = 2.0  # seconds for one text; most take a few milliseconds
HALF = load("dgx1-v100").subset(range(4))


def plan(text: str) -> None:
    made = mscclpp.read(text)
    assert mscclpp.read(made.to_json()) == made
    verify(made)


def graph(text: str) -> None:
    for one in nccl_graph.read(text).values():
        one.algorithm(HALF)


def trees(text: str) -> None:
    for make in rccl.read(text).values():
        make(HALF)


def log(text: str) -> None:
    assert nccl_tests.read(text).rows


FORMS: dict[str, tuple[Callable[[str], Any], Sequence[str]]] = {
    "mscclpp": (plan, [json.dumps(data) for data in FILES.values()]),
    "graph": (graph, [dump((0, RINGS), (1, CHAINS)), dump((0, RINGS), nets='<net dev="0"/>')]),
    "rccl": (trees, ['RCCL_TREES="(0(1(2))(3))|(3(2)(1)(0))"', "NCCL_RINGS='0 1 2 3|3 2 1 0'"]),
    "nccl-tests": (log, [old(V100), new(V100), TAGGED, written(V100)]),
}


def quickly(form: str, text: str) -> None:
    start = time.process_time()
    try:
        FORMS[form][0](text)
    except CollectiveError:
        pass
    assert time.process_time() - start < LONGEST


@pytest.mark.parametrize("form", FORMS)
def test_the_texts_are_read_as_they_are(form: str) -> None:
    for text in FORMS[form][1]:
        FORMS[form][0](text)


@pytest.mark.parametrize(
    "examples", [150, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("form", FORMS)
def test_edited_texts_are_read_or_refused(form: str, examples: int) -> None:
    attempt(quickly, form, FORMS[form][1], examples)


@QUICK
@given(st.sampled_from(sorted(FORMS)), st.lists(st.one_of(st.sampled_from(WORDS), st.text())))
def test_random_texts_are_read_or_refused(form: str, words: Sequence[str]) -> None:
    quickly(form, "".join(words))
