"""Whatever text the readers are given: a machine, or a TopologyError, within a second; of foreign
forms what is in it, or a CollectiveError. What is read of MSCCL++ is written and read again, and
proved or refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mscclpp_files import FILES
from test_judge import TAGGED, V100, new, old, written
from test_nccl_graph import CHAINS, RINGS, dump

from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import mscclpp, nccl_graph, nccl_tests, rccl
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.topology import Topology, TopologyError, load
from linkweave.topology.readers.nccl_write import to_nccl_xml
from tests.null.fixtures import DUMPS, GRAPH_FILE, P2P, SMI, VENDOR_FILES, coloured, listed

LINKS = """{"format": "linkweave-links", "version": 1, "machine": "", "together": 5e9, "pairs":
[{"src": 0, "dst": 1, "bandwidth": 2e10, "latency_us": 1.5}, {"src": 1, "dst": 0, "bandwidth": 1}],
"devices": [{"gpu": 0, "bus_id": "0000:06:00.0", "uuid": "GPU-0"}, {"gpu": 1}]}"""
CLUSTERS = (
    "16 x dgx-a100  nics=rail  nic=24GB/s  leaf=8  oversubscription=3:1  latency=5us",
    "# a cluster\n4 x pcie-8 # four nodes\n  nics=1\n  nic=200Gb/s\n  oversubscription=3/2\n",
    "2 x dgx1-v100",
)
FORMS: dict[str, Sequence[str]] = {
    "smi": [*SMI.values(), coloured(SMI["quad"]), listed("Tesla V100-SXM2", 4, 2) + SMI["cloud"]],
    "xml": [*DUMPS.values(), VENDOR_FILES["aws"], GRAPH_FILE],
    "json": [load(SMI["mixed"]).to_json(), load(DUMPS["a100x4"]).to_json()],
    "cluster": CLUSTERS,
    "p2p": [P2P],
    "links": [LINKS],
}
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


FOREIGN: dict[str, tuple[Callable[[str], None], Sequence[str]]] = {
    "mscclpp": (plan, [json.dumps(data) for data in FILES.values()]),
    "graph": (graph, [dump((0, RINGS), (1, CHAINS)), dump((0, RINGS), nets='<net dev="0"/>')]),
    "rccl": (trees, ['RCCL_TREES="(0(1(2))(3))|(3(2)(1)(0))"', "NCCL_RINGS='0 1 2 3|3 2 1 0'"]),
    "nccl-tests": (log, [old(V100), new(V100), TAGGED, written(V100)]),
}
TEXTS = {**FORMS, **{form: texts for form, (_, texts) in FOREIGN.items()}}
WORDS = [
    "", " ", "\t", "\n", "\r\n", "\0", "\x1b[4m", "\u2028", "\ufeff", "\ud800", "é", "٣", "²", "X",
    "GPU0", "GPU7", "GPU99999", "NV1", "NV999", "PIX", "SYS", "SOC", "N/A", "mlx5_0", "MIG 1g",
    "CPU Affinity", "NUMA Affinity", "0", "-1", "1e400", "nan", "9" * 30, "9" * 400, "9" * 5000,
    "<", ">", "/>", "&lt;", "&a;", "<!DOCTYPE a>", "<![CDATA[", "<cpu numaid='0'>", "</cpu>",
    "<gpu/>", "<nic><net/></nic>", "<c2c/>", 'count="2"', '"', "'", "{", "}", "[", "]", ",", ":",
    "null", "true", "[" * 5000, "[]", "{}", '"src": 0', '"kind": "pcie"', "=", "x", "#",
    "leaf=0", "nic=0GB/s", "3:0", "D\\D",
    "algbw  busbw", "Unidirectional P2P=Enabled Bandwidth Matrix (GB/s)", "%", "$ ", "1.5", "inf",
]  # fmt: skip

Edit = tuple[str, int, int, str]
"""(what is done, where, to how many characters, words or lines, the word that is put in)."""
KINDS = (
    "delete", "insert", "replace", "duplicate", "move", "cut", "replace words", "replace words",
    "move words", "delete lines", "duplicate lines", "move lines",
)  # fmt: skip


def edited(text: str, edits: Sequence[Edit]) -> str:
    for kind, at, length, word in edits:
        what, _, unit = kind.partition(" ")
        pattern = {"words": r"\w+|\W", "lines": r".*\n?"}.get(unit, r"(?s).")
        parts = re.findall(pattern, text)
        at %= len(parts) + 1
        before, there, after = parts[:at], parts[at : at + length], parts[at + length :]
        new = {
            "delete": [*before, *after],
            "insert": [*before, word, *there, *after],
            "replace": [*before, word, *after],
            "duplicate": [*before, *there, *there, *after],
            "move": [*before, *after, *there],
            "cut": before,
        }[what]
        text = "".join(new)
    return text


def quickly(form: str, text: str) -> None:
    """Read or refuse it in so many seconds of this process; most take a few milliseconds."""
    start = time.process_time()
    try:
        read(form, text)
    except CollectiveError:
        assert form in FOREIGN  # other forms end with a TopologyError, see below
    assert time.process_time() - start < (2.0 if form in FOREIGN else 1.0)


def read(form: str, text: str) -> None:
    """Read it; a machine that is made must be sound, and can be written and read again."""
    if form in FOREIGN:
        FOREIGN[form][0](text)
        return
    try:
        made = load("mesh-4", measured="\n" + text) if form in ("p2p", "links") else load(text)
    except TopologyError:
        return
    assert Topology.from_json(made.to_json()) == made
    if form in ("smi", "xml"):
        try:
            again = to_nccl_xml(made)
        except TopologyError:
            return
        assert load(again).gpus == tuple(sorted(made.gpus))


EDITS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 8000),
        st.one_of(st.integers(0, 8), st.integers(0, 300)),
        st.one_of(st.sampled_from(WORDS), st.text(max_size=8)),
    ),
    min_size=1,
    max_size=4,
)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("form", TEXTS)
def test_the_texts_are_read_as_they_are(form: str) -> None:
    for text in TEXTS[form]:
        read(form, text)


def test_edits() -> None:
    assert edited("abc\ndef\n", [("replace", 1, 3, "X"), ("duplicate lines", 0, 1, "")]) == (
        "aXdef\naXdef\n"
    )


@pytest.mark.parametrize(
    "slow", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("form", TEXTS)
def test_edited_texts_are_read_or_refused(form: str, slow: bool) -> None:
    examples = (150, 5_000) if form in FOREIGN else (300, 20_000)

    @settings(QUICK, max_examples=examples[slow])
    @given(st.sampled_from(TEXTS[form]), EDITS)
    def once(text: str, edits: Sequence[Edit]) -> None:
        quickly(form, edited(text, edits))

    once()


@settings(QUICK, max_examples=600)
@given(st.sampled_from(sorted(TEXTS)), st.lists(st.one_of(st.sampled_from(WORDS), st.text())))
def test_random_texts_are_read_or_refused(form: str, words: Sequence[str]) -> None:
    quickly(form, "".join(words))
    quickly(form, "\n".join(words))
