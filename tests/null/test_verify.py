"""The verifier: right plans pass, and no mutant that could give a wrong result does."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, algorithm_for
from linkweave.collectives.planning.dataflow import walk
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Tuning, lower
from linkweave.collectives.planning.plan import Connection, Op, Plan, Step
from linkweave.collectives.planning.verify import races, shortened, verify
from linkweave.topology import load
from tests.null.executor import Executor, is_right, why_wrong
from tests.null.helpers import (
    SPECIAL,
    all_steps,
    by_hand,
    caught,
    check_wrong,
    edited,
    hop,
    lowered,
    missed,
    random_plan,
    receive,
    send,
    step,
    swapped,
    without,
)

SEEDS = range(100)
REDUCE, COPY, SEND, WAIT, SIGNAL = Op.REDUCE, Op.COPY, Op.SEND, Op.WAIT, Op.SIGNAL


# ---- random plans and their mutants ---------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_pass_and_are_right(seed: int) -> None:
    plan, topo = random_plan(seed)
    verify(plan, topo, expand=True)
    assert is_right(plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_dropped_step_and_every_late_wait_is_caught(seed: int) -> None:
    assert not missed(*random_plan(seed))


# ---- order, and the short form ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_the_order_of_the_walk_does_not_matter(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, topo = random_plan(seed)
    todo = Counter(
        (i, c, step.op) for i, s in enumerate(plan.tracks) for _, c, step in plan.steps(s)
    )
    rng = random.Random(seed)
    mutants = [without(plan, rng.choice(list(all_steps(plan)))[0])]
    for (s, p, at), _ in rng.sample(list(all_steps(plan)), 6):
        mutants.append(swapped(plan, (s, p, at), max(at - 1, 0)))
    verdicts = [caught(m, topo) for m in (plan, *mutants)]
    assert not verdicts[0]
    for other in range(3):
        seen: list[tuple[int, int, Op]] = []
        see = seen.append
        walk(
            plan,
            lambda v, see=see: see((v.track_index, v.chunk, v.step.op)),
            other,
            lambda index, chunk, op, *_, see=see: see((index, chunk, op)),
        )
        assert Counter(seen) == todo
        monkeypatch.setattr("linkweave.collectives.planning.verify.walk", partial(walk, seed=other))
        assert [caught(m, topo) for m in (plan, *mutants)] == verdicts


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [n for n in ALGORITHMS["allreduce"] if n not in SPECIAL])
def test_the_short_form_has_the_verdict_of_the_long_one(name: str, slots: int) -> None:
    topo = load("mesh-5")
    stride = algorithm_for(name, topo).stride
    plan = lowered(name, topo, (slots + 4) * stride + 1, slots)
    assert shortened(plan).num_chunks < plan.num_chunks
    assert shortened(plan).num_chunks % plan.stride == plan.num_chunks % plan.stride
    verify(plan, topo)
    verify(plan, topo, expand=True)
    rng = random.Random(f"{name} {slots}")
    for (s, p, at), _ in rng.sample(list(all_steps(plan)), 10):
        body = plan.tracks[s].phases[p]
        for mutant in (
            without(plan, (s, p, at)),
            swapped(plan, (s, p, at), (at + 1) % len(body)),
            swapped(plan, (s, p, at), rng.randrange(len(body))),
        ):
            assert caught(mutant, topo, expand=False) == caught(mutant, topo, expand=True)


@pytest.mark.parametrize("seed", range(0, 200, 4))
def test_random_plans_have_one_verdict_in_both_forms(seed: int) -> None:
    plan, topo = random_plan(seed)
    rng = random.Random(seed)
    plan = plan.with_chunks(plan.stride * (plan.slots + 5) + rng.randrange(plan.stride))
    for (s, p, at), _ in rng.sample(list(all_steps(plan)), 6):
        mutant = swapped(plan, (s, p, at), rng.randrange(len(plan.tracks[s].phases[p])))
        assert caught(mutant, topo, expand=False) == caught(mutant, topo, expand=True)


def late_reader(num_chunks: int, slots: int) -> Plan:
    """Rank 2 takes rank 0's chunks, which come over rank 1, only after all of rank 1's own, which
    come over rank 0 after all that rank 0 sends: right until the slots on the way are full."""
    connections = [
        hop(0, 0, 1, 0), hop(1, 0, 2, 0), hop(1, 1, 0, 0), hop(0, 0, 2, 0), hop(2, 0, 0, 1),
        hop(2, 0, 1, 2),
    ]  # fmt: skip
    forward = [step(WAIT, 2), *send(3, source=2), step(SIGNAL, 2)]
    both = [step(WAIT, 4), step(WAIT, 5), step(SEND, 4, 5), step(SIGNAL, 4), step(SIGNAL, 5)]
    return by_hand(
        connections,
        {
            (0, 0): [send(0), forward],
            (0, 1): [[], [], receive(COPY, 4)],
            (1, 0): [[step(WAIT, 0), *send(1, source=0), step(SIGNAL, 0)]],
            (1, 1): [send(2)],
            (1, 2): [[], [], receive(COPY, 5)],
            (2, 0): [receive(REDUCE, 3), receive(REDUCE, 1, last=True), both],
        },
        num_chunks=num_chunks,
        slots=slots,
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_hang_that_takes_many_groups_is_found_in_the_short_form_too(slots: int) -> None:
    topo = load("mesh-3")
    verify(late_reader(1, slots), topo, expand=True)
    assert is_right(late_reader(2 * slots, slots))
    for num_chunks in range(2 * slots + 1, 2 * slots + 40, 3):
        with pytest.raises(PlanError, match="the plan hangs"):
            verify(late_reader(num_chunks, slots), topo, expand=True)
        with pytest.raises(PlanError):
            verify(late_reader(num_chunks, slots), topo)


# ---- ranks on one memory, without slots -------------------------------------------


class Direct(Executor):
    """No slots: a REDUCE reads where the sender's data lies, a SEND to a COPY writes there."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        super().__init__(plan, seed, calls=1)
        sends = [s for _, s in all_steps(plan) if s.op is SEND]
        passed_on = {i for s in sends if s.source is not None for i in s.connections}
        copied = {i for _, s in all_steps(plan) if s.op is COPY for i in s.connections}
        self.written = copied - passed_on
        self.lies: dict[tuple[int, int], int] = {}  # on which rank

    def move(self, who: int, at: int, chunk: int, step: Step) -> None:
        rank = self.plan.tracks[who].rank
        came = [] if step.op is SEND else [self.came(rank, i) for i in step.connections]
        if step.op is SEND:
            origin = rank if step.source is None else self.came(rank, step.source)
            for i in step.connections:
                cursor = self.cursor(rank, i)
                self.lies[i, cursor["sent"]] = origin
                cursor["sent"] += 1
                if i in self.written:
                    data = self.own(who, rank, chunk, False).copy()
                    self.own(who, self.plan.connections[i].dst, chunk, True)[...] = data
        elif step.op is REDUCE:
            self.reduce(who, chunk, step, [self.own(who, r, chunk, False).copy() for r in came])
        elif step.connections[0] not in self.written:
            data = self.own(who, came[0], chunk, False).copy()
            self.own(who, rank, chunk, True)[...] = data

    def came(self, rank: int, connection: int) -> int:
        cursor = self.cursor(rank, connection)
        cursor["read"] += 1
        return self.lies[connection, cursor["read"] - 1]

    def give_back(self, rank: int, caller: int) -> None:
        """Not before the tracks of all ranks have ended."""


def test_plans_without_direct_races_need_no_slots() -> None:
    kinds = Counter()
    for seed in range(200):
        plan, _ = random_plan(seed)
        wrong = why_wrong(Direct(plan, seed))
        safe = not races(plan, direct=True)
        assert not races(plan)
        assert not (safe and wrong), seed
        kinds[safe] += 1
    assert kinds[True] >= 100 and kinds[False] >= 10
    for name in ("tree", "two_shot", "overlapped_double_tree"):
        topo = load("cpu-6")
        assert not races(lowered(name, topo, 13), direct=True)


# ---- plans that are wrong by hand, and what is said of them -----------------------------------

PAIR = [hop(1, 0, 0), hop(0, 0, 1, 1)]


def pair(**tracks: list) -> Plan:
    """Rank 1 sends up, rank 0 reduces and sends back; `r0`, `r1up` and `r1down` replace a part."""
    parts = {
        "r0": [*receive(REDUCE, 0, last=True), *send(1)],
        "r1up": send(0),
        "r1down": receive(COPY, 1),
        **tracks,
    }
    keys = {"r0": (0, 0), "r1up": (1, 0), "r1down": (1, 1)}
    return by_hand(PAIR, {keys[name]: [body] for name, body in parts.items()})


def test_the_pair_itself_is_right() -> None:
    verify(pair(), load("mesh-2"))
    assert is_right(pair())


WRONG_PAIRS = {
    "waits for two": (
        {"r0": [step(WAIT, 0, 1)]}, "WAIT takes only one connection, not 2",
    ),
    "twice": (
        {"r0": [*receive(REDUCE, 0, last=True), *receive(REDUCE, 0), *send(1)],
         "r1up": [*send(0), *send(0)]},
        r"rank 0 channel 0 step 4: REDUCE of chunk 0 counts ranks \[1\] twice \(connection 1 -> 0",
    ),
    "not marked last": (
        {"r0": [*receive(REDUCE, 0), *send(1)]},
        r"REDUCE of chunk 0 covers ranks \[0, 1\], yet it is not marked as the last one",
    ),
    "handed on too early": (
        {"r0": [*send(1), *receive(REDUCE, 0, last=True)]},
        "race: rank 1 channel 1 .* COPY of chunk 0 is not ordered after: rank 1 channel 0 .* SEND",
    ),
    "in another's track": (
        {"r1up": [*receive(COPY, 1), *send(0)], "r1down": []},
        "connection 1 does not end here",
    ),
    "one sent too many": (
        {"r1up": [*send(0), *send(0)]},
        "connection 1 -> 0 ch 0: 2 sent, but 1 read",
    ),
    "read before its wait": (
        {"r0": [step(REDUCE, 0, last=True), step(WAIT, 0), step(SIGNAL, 0), *send(1)]},
        r"step 0 \(REDUCE of chunk 0\): reads connection 1 -> 0 ch 0 without a WAIT for its data",
    ),
    "written before its wait": (
        {"r1up": [step(SEND, 0), step(WAIT, 0), step(SIGNAL, 0)]},
        r"rank 1 .* \(SEND of chunk 0\): writes connection 1 -> 0 ch 0 without a WAIT for a free",
    ),
    "announced before it is sent": (
        {"r1up": [step(WAIT, 0), step(SIGNAL, 0), step(SEND, 0)]},
        "signals data on connection 1 -> 0 ch 0 before sending it",
    ),
    "freed before it is read": (
        {"r1down": [step(WAIT, 1), step(SIGNAL, 1), step(COPY, 1)]},
        "frees a slot of connection 0 -> 1 ch 0 -> ch 1 before reading it",
    ),
    "sent the wrong way": ({"r0": [step(SEND, 0)]}, "sends on connection 0, which does not begin"),
    "read the wrong way": ({"r1up": [step(REDUCE, 0)]}, "reads connection 0, which does not end"),
    "no such connection": ({"r1up": send(7)}, "WAIT names connection 7; the plan has 2"),
    "forwards what it does not get": (
        {"r0": [*receive(REDUCE, 0, last=True), step(WAIT, 1), step(SEND, 1, source=1)]},
        "SEND names a connection twice",
    ),
    "chunk outside its group": (
        {"r1up": send(0, chunk=1)},
        "rank 1 channel 0 step 0: WAIT needs a connection and a chunk below the stride 1, not 1",
    ),
    "no connection": ({"r1up": [step(WAIT)]}, "WAIT needs a connection"),
    "waits twice at once": ({"r0": [step(WAIT, 0, 0)]}, "WAIT names a connection twice"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_PAIRS)
def test_a_wrong_pair_is_told_what_is_wrong(what: str) -> None:
    parts, words = WRONG_PAIRS[what]
    with pytest.raises(PlanError, match=words):
        verify(pair(**parts), load("mesh-2"))


def test_a_rank_left_out_is_named() -> None:
    plan = by_hand(PAIR, {
        (0, 0): [[*receive(REDUCE, 0), *send(1)]],
        (1, 0): [send(0)],
        (1, 1): [receive(COPY, 1)],
        (2, 0): [[]],
    })  # fmt: skip
    words = r"rank 0 ends with chunk 0 combined over ranks \[0, 1\], not over ranks \[0, 1, 2\]"
    with pytest.raises(PlanError, match=words):
        verify(plan, load("mesh-3"))
    (s, p, at), old = next(x for x in all_steps(plan) if x[1].op is REDUCE)
    body = list(plan.tracks[s].phases[p])
    body[at] = replace(old, last=True)
    with pytest.raises(PlanError, match=r"covers ranks \[0, 1\], yet it is marked as the last one"):
        verify(edited(plan, s, p, body), load("mesh-3"))


def test_a_hang_names_who_waits_for_whom() -> None:
    connections = [hop(0, 0, 1), hop(1, 0, 0)]
    body = {0: [*receive(REDUCE, 1, last=True), *send(0)], 1: [*receive(REDUCE, 0), *send(1)]}
    with pytest.raises(PlanError) as told:
        verify(by_hand(connections, {(r, 0): [body[r]] for r in body}), load("mesh-2"))
    assert str(told.value) == (
        "the plan hangs: rank 0 channel 0 step 0 waits for data of chunk 0 from rank 1; "
        "rank 1 channel 0 step 0 waits for data of chunk 0 from rank 0"
    )
    around = [hop(r, 0, (r + 1) % 6) for r in range(6)]  # each waits for the one before it
    plan = by_hand(around, {(r, 0): [receive(REDUCE, (r - 1) % 6)] for r in range(6)})
    with pytest.raises(PlanError, match=r"waits for .* from rank 5; .*; and 2 more$"):
        verify(plan, load("mesh-6"))
    full = by_hand([hop(1, 0, 0)], {(0, 0): [[]], (1, 0): [send(0)]}, num_chunks=3)
    with pytest.raises(PlanError, match="waits for a free slot of chunk 2 from rank 0"):
        verify(full, load("mesh-2"))


def test_links_are_checked_against_the_machine() -> None:
    plan = lowered("chain", load("mesh-4"), 4)
    with pytest.raises(PlanError, match=r"the plan is for 4 ranks; mesh-5 has 5 GPUs"):
        verify(plan, load("mesh-5"))
    with pytest.raises(PlanError, match=r"connection \d -> \d ch .*: ring-5 has no link \d->\d"):
        verify(lowered("two_shot", load("mesh-5"), 4), load("ring-5"))
    with pytest.raises(PlanError, match=r"the plan claims exclusive links, but 2 connections take "
                       r"link \d->\d, which has 1"):  # fmt: skip
        verify(replace(lowered("two_shot", load("mesh-4"), 4), exclusive=True), load("mesh-4"))

    def over(*path: int) -> Plan:
        return replace(plan, connections=(Connection(2, 0, 0, 0, path), *plan.connections))

    with pytest.raises(PlanError, match=r"hardware does not route through \[1\]"):
        verify(over(2, 1, 0), load("ring-4"))
    with pytest.raises(
        PlanError, match=r"runs over \(2, 1\), which does not lead from GPU 2 to GPU 0"
    ):
        verify(over(2, 1), load("ring-4"))
    with pytest.raises(PlanError, match=r"runs over \(\), which does not lead from GPU 2 to GPU 0"):
        verify(over(), load("ring-4"))


def test_tracks_are_checked() -> None:
    plan = pair()
    with pytest.raises(PlanError, match="two tracks share a rank and a channel"):
        verify(replace(plan, tracks=(*plan.tracks, plan.tracks[0])), load("mesh-2"))
    with pytest.raises(PlanError, match="a track has rank 2, channel 0; the plan has 2 ranks"):
        stray = replace(plan.tracks[0], rank=2)
        verify(replace(plan, tracks=(*plan.tracks, stray)), load("mesh-2"))


ONE_SHOT = [hop(0, 1, 1), hop(1, 1, 0), hop(0, 1, 0), hop(1, 1, 1)]  # two of data, two of order


def exchange(ordered: bool) -> Plan:
    """Both ranks send on channel 1 and reduce on channel 0, which must wait for the send."""
    tracks = {}
    for rank in (0, 1):
        tell, hear = [step(SIGNAL, 2 + rank)], [step(WAIT, 2 + rank)]
        take = receive(REDUCE, 1 - rank, last=True, ahead=rank)
        tracks[rank, 1] = [[*send(rank), *(tell if ordered else [])]]
        tracks[rank, 0] = [[*(hear if ordered else []), *take]]
    return by_hand(ONE_SHOT, tracks)


def test_two_tracks_of_a_rank_must_be_ordered() -> None:
    verify(exchange(ordered=True), load("mesh-2"))
    with pytest.raises(PlanError) as told:
        verify(exchange(ordered=False), load("mesh-2"))
    first = r"race: rank 1 channel 0 step 1: REDUCE of chunk 0 is not ordered after: " \
            r"rank 1 channel 1 step 1: SEND of chunk 0"  # fmt: skip
    assert str(told.value).replace("rank 0", "rank 1").startswith(first)
    assert str(told.value).endswith("(and 1 more)")
    assert not is_right(exchange(ordered=False))


def test_chunks_are_not_mixed_up() -> None:
    """Rank 0 takes for chunk 1 what rank 1 sent as chunk 0: all ranks are in, once, and wrong."""

    def mixed(first: int, second: int) -> Plan:
        takes = [*receive(REDUCE, 0, first, last=True), *receive(REDUCE, 0, second, last=True)]
        return by_hand(
            PAIR,
            {
                (0, 0): [[*takes, *send(1, 0), *send(1, 1)]],
                (1, 0): [[*send(0, 0), *send(0, 1)]],
                (1, 1): [[*receive(COPY, 1, 0), *receive(COPY, 1, 1)]],
            },
            num_chunks=2,
            stride=2,
        )

    verify(mixed(0, 1), load("mesh-2"))
    check_wrong(mixed(1, 0), load("mesh-2"))


def test_a_forwarder_does_not_mix_up_chunks() -> None:
    """Rank 2 passes rank 1's chunk 0 on as chunk 1, and rank 0 takes it as that."""
    topo = load("mesh-3")
    rounds = (
        tuple(Reduce((1,), 0, c, 0) for c in (0, 1)),
        tuple(Reduce((2,), 0, c, 0) for c in (0, 1)),
        tuple(Copy(0, (1, 2), c, 1) for c in (0, 1)),
    )
    detours = {(0, 1, 0): (2,)}
    plan = lower(Algorithm("by hand", 3, 2, (rounds,), (), detours), topo, Tuning(2))
    verify(plan, topo)
    assert is_right(plan)
    ((where, forward),) = [x for x in all_steps(plan) if x[1].source is not None and not x[1].chunk]
    theirs = {*forward.connections, forward.source}
    for s, track in enumerate(plan.tracks):
        if s == where[0] or track.rank == 0:
            body = [
                replace(x, chunk=1 - x.chunk) if theirs & set(x.connections) else x
                for x in track.phases[0]
            ]
            plan = edited(plan, s, 0, body)
    check_wrong(plan, topo)


def test_a_copy_takes_one_value() -> None:
    """Rank 2 copies from two connections that hold {0} and {1, 2}: only the first would count."""
    connections = [
        hop(1, 0, 0), hop(2, 0, 0), hop(0, 0, 1, 1), hop(0, 0, 2, 1), hop(2, 3, 1, 3),
        hop(1, 3, 2, 1), hop(1, 0, 1, 3), hop(1, 3, 1, 1), hop(2, 0, 2, 1), hop(2, 3, 2, 1),
    ]  # fmt: skip
    gather = [step(WAIT, 0), step(WAIT, 1), step(REDUCE, 0, 1, last=True),
              step(SIGNAL, 0), step(SIGNAL, 1)]  # fmt: skip
    partly = [step(WAIT, 4), step(WAIT, 6), step(REDUCE, 4), step(SIGNAL, 4), *send(5)]
    halves = [*(step(WAIT, i) for i in (3, 5, 8, 9)), step(COPY, 3, 5), step(SIGNAL, 3),
              step(SIGNAL, 5)]  # fmt: skip
    plan = by_hand(
        connections,
        {
            (0, 0): [[*send(3), *gather, *send(2)]],
            (1, 0): [[*send(0), step(SIGNAL, 6)]],
            (1, 1): [[step(WAIT, 2), step(WAIT, 7), step(COPY, 2), step(SIGNAL, 2)]],
            (1, 3): [[*partly, step(SIGNAL, 7)]],
            (2, 0): [[*send(1), step(SIGNAL, 8)]],
            (2, 1): [halves],
            (2, 3): [[*send(4), step(SIGNAL, 9)]],
        },
    )
    check_wrong(plan, load("mesh-3"))


def test_order_within_a_rank_carries_no_data() -> None:
    take = [*receive(REDUCE, 0, last=True), step(WAIT, 2), step(REDUCE, 2), *send(1)]
    plan = by_hand(
        [*PAIR, hop(0, 5, 0, 0)],
        {
            (0, 0): [take],
            (0, 5): [[step(SIGNAL, 2)]],
            (1, 0): [send(0)],
            (1, 1): [receive(COPY, 1)],
        },
    )
    with pytest.raises(PlanError):
        verify(plan, load("mesh-2"))


@pytest.mark.parametrize("nodes", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_a_thousand_ranks_are_proved_in_seconds(nodes: int) -> None:
    """4 s of one core; the process grows to 280 MiB, of which 170 are the proof's."""
    topo = load(f"{nodes} x dgx-a100")
    plan = lowered("hierarchical", topo, 64)
    assert (plan.size, plan.groups) == (8 * nodes, 4)
    start = time.process_time()
    verify(plan, topo)
    assert time.process_time() - start < 30


def _pairing(signals: tuple[int, ...], waits: tuple[int, ...]) -> Plan:
    """A rank whose first track signals, and whose second waits, for these chunks of a group."""
    tracks = {
        (0, 0): [[step(SIGNAL, 0, chunk=c) for c in signals]],
        (0, 1): [[step(WAIT, 0, chunk=c) for c in waits]],
    }
    return by_hand([Connection(0, 0, 0, 1)], tracks, num_chunks=101, stride=2)


@pytest.mark.parametrize(("signals", "waits"), [((0,) * 4, (1,) * 5), ((1,) * 5, (0,) * 4)])
def test_groups_that_do_not_pair_are_walked_in_full(
    signals: tuple[int, ...], waits: tuple[int, ...]
) -> None:
    """On the few chunks that prove other plans their totals happen to agree."""
    plan = _pairing(signals, waits)
    assert shortened(plan) == plan
    with pytest.raises(PlanError, match=r"hangs|connection"):
        verify(plan, load("mesh-1"))
    assert shortened(_pairing((0, 1), (1, 0))).num_chunks < 101


def test_the_sender_of_order_does_not_wait() -> None:
    """The simulator and the CPU runtime would wait for ever."""
    tracks = {(0, 0): [[step(WAIT, 0), step(SIGNAL, 0)]], (0, 1): [[step(WAIT, 0)]]}
    plan = by_hand([Connection(0, 0, 0, 1)], tracks, num_chunks=3)
    with pytest.raises(PlanError, match="waits for a free slot of 0, which only orders steps"):
        verify(plan, load("mesh-1"))
