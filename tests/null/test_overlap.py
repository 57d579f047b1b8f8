"""Schedules of gradient communication: policies against their papers, optima, bounds."""

from __future__ import annotations

import importlib
import math
import random
from itertools import accumulate, count, permutations
from types import SimpleNamespace

import literal
import pytest
from overlap_cases import case

from linkweave.collectives import overlap
from linkweave.collectives.overlap import Communication, Layer, Network, Piece, Profile, Schedule
from linkweave.collectives.overlap.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from linkweave.collectives.overlap.policies.asc_wfbp import asc_wfbp, layer_types
from linkweave.collectives.overlap.policies.bytescheduler import bytescheduler
from linkweave.collectives.overlap.policies.fusion_dp import fusion_dp
from linkweave.collectives.overlap.policies.mg_wfbp import mg_wfbp
from linkweave.collectives.overlap.policies.optimal import EXACT, _by_two_phases, every_fusion
from linkweave.collectives.overlap.policies.us_byte import First, first_phase, iteration, priorities
from linkweave.collectives.overlap.schedule import jackson
from linkweave.collectives.overlap.timeline import StepTimeline

CASES = 500


def near(spans: list[tuple[float, float]]) -> tuple[object, ...]:
    return tuple((pytest.approx(start), pytest.approx(end)) for start, end in spans)


def groups_of(schedule: Schedule) -> list[list[int]]:
    return [[piece.layer for piece in c.pieces] for c in schedule.communications]


# ---- each policy is its paper's ----------------------------------------------------------------
@pytest.mark.parametrize("policy", ["wfbp", "c-cube"])
def test_wfbp_and_c_cube(policy: str) -> None:
    slow = {"wfbp": literal.wfbp, "c-cube": literal.c_cube}[policy]
    for seed in range(CASES):
        found = overlap.plan(*case(seed), policy).predicted_seconds
        assert found == pytest.approx(slow(*case(seed)), rel=1e-12)


def test_mg_wfbp() -> None:
    for seed in range(CASES):
        profile, network = case(seed)
        assert groups_of(mg_wfbp(profile, network)) == literal.mg_wfbp(profile, network), seed


def test_asc_wfbp() -> None:
    kinds = set()
    for seed in range(CASES):
        profile, network = case(seed)
        types = layer_types(profile, network)
        assert types == literal.asc_types(profile, network), seed
        kinds |= set(types)
        made = asc_wfbp(profile, network)
        groups = groups_of(made)
        for number, c in enumerate(made.communications):
            earlier = made.communications[max(0, number - 2) : number]
            if types[c.pieces[-1].layer] == "normal":  # behind what may be under way
                assert c.after == tuple(range(max(0, number - 2), number))
            elif earlier:  # beside the one before
                assert c.after == () and c.lane != earlier[-1].lane
        for group in groups:  # merged ones travel with the next that is not
            assert [types[i] == "merged" for i in group] == [True] * (len(group) - 1) + [False]
    assert kinds == {"normal", "merged", "simultaneous"}


@pytest.mark.parametrize("credit", [1, 2, 4])
def test_bytescheduler(credit: int) -> None:
    for seed in range(CASES):
        profile, network = case(seed, 6)
        partition = random.Random(seed).choice([10**6, 10**7, 10**9])
        made = bytescheduler(profile, network, partition, credit)
        sent = [(c.pieces[0].layer, c.nbytes, c.lane) for c in made.communications]
        want = literal.bytescheduler(profile, network, partition, credit)
        # lanes that are free alike may be taken in any order
        assert [x[:2] for x in sent] == [x[:2] for x in want], seed


def test_us_byte() -> None:
    for seed in range(CASES):
        profile, network = case(seed)
        rng = random.Random(seed)
        partition = rng.choice([1600, 10**6, 4 << 20])
        if partition == 1600:  # literally one block after another
            profile = Profile(tuple(
                Layer(layer.name, min(layer.nbytes, 50_000), layer.forward_s, layer.backward_s)
                for layer in profile.layers
            ))  # fmt: skip
        priority = [float(x) for x in rng.sample(range(len(profile.layers)), len(profile.layers))]
        found = first_phase(profile, network, partition, priority)
        sends, left, free = literal.us_byte_first(profile, network, partition, [0.0, *priority])
        assert [(a + 1, b) for a, b, _ in found.sends] == [(a, b) for a, b, _ in sends], seed
        assert list(found.left) == left and found.free == pytest.approx(free, rel=1e-9)
        assert [x[2] for x in found.sends] == pytest.approx([x[2] for x in sends], rel=1e-9)


def test_us_bytes_greedy_raises_what_shortens_the_iteration() -> None:
    raised = 0
    for seed in range(CASES):
        profile, network = case(seed)
        plain = [float(i) for i in range(len(profile.layers))]
        made = priorities(profile, network, 1 << 20)
        before, after = (
            iteration(profile, network, 1 << 20, first_phase(profile, network, 1 << 20, p))
            for p in (plain, made)
        )
        assert after <= before
        raised += after < before
        first = first_phase(profile, network, 1 << 20, made)
        # equation 11 waits for the channel where the timeline waits for gradients only
        own = overlap.plan(profile, network, "us-byte", partition=1 << 20).predicted_seconds
        assert own <= iteration(profile, network, 1 << 20, first) + 1e-12
    assert raised > 5


def test_us_bytes_blocks_are_of_4_megabits() -> None:
    profile, network = Profile((Layer("x", 4 << 20, 1e-3, 1e-3),)), Network(1e-3, 1e-9)
    assert overlap.plan(profile, network, "us-byte").note.startswith("basic blocks of 500000 bytes")


def test_us_bytes_greedy_is_algorithm_2() -> None:
    for seed in range(CASES):
        profile, network = case(seed, 8)
        found = priorities(profile, network, 1 << 20)
        assert found == [x - 1 for x in literal.us_byte_priorities(profile, network, 1 << 20)], seed


def test_theorem_1_sequential_is_the_best_second_phase() -> None:
    for seed in range(100):
        profile, network = case(seed, 5)
        size = len(profile.layers)
        first = First((), tuple(math.ceil(x.nbytes / 10**6) for x in profile.layers), 0.0)
        sequential = iteration(profile, network, 10**6, first)
        for order in permutations(range(size)):
            at, there = profile.backward_s, {}
            for i in order:
                at += network.seconds(profile.layers[i].nbytes)
                there[i] = at
            now = profile.backward_s
            for i, layer in enumerate(profile.layers):
                now = max(now, there[i]) + layer.forward_s
            assert sequential <= now + 1e-12


# ---- exact solvers, against all there are ------------------------------------------------------
def test_fusion_is_the_best_of_all_contiguous_ones() -> None:
    for seed in range(200):
        profile, network = case(seed, 9)
        all_of_them = literal.contiguous(len(profile.layers))
        best = min(literal.end_of_groups(profile, network, g)[0] for g in all_of_them)
        found = literal.end_of_groups(profile, network, groups_of(fusion_dp(profile, network)))[0]
        assert found == pytest.approx(best, rel=1e-12), seed


def test_every_fusion_is_the_best_of_all_ordered_partitions() -> None:
    """Of whole tensors, from 4 on; of up to 3 tensors cut into blocks that are layers here."""
    for seed in range(60):
        profile, network = case(seed, 5)
        parts = max(1, EXACT // len(profile.layers))
        if len(profile.layers) == 1:  # 7 blocks in all orders are too many for this test
            continue
        layers = []
        for layer in profile.layers:
            ends = [layer.nbytes * n // parts // 16 * 16 for n in range(parts)] + [layer.nbytes]
            sizes = [b - a for a, b in zip(ends, ends[1:], strict=False) if a < b]
            for n, size in enumerate(sizes, 1):  # the times are the last block's
                last = n == len(sizes)
                layers.append(Layer(layer.name, size, layer.forward_s * last,
                                    layer.backward_s * last))  # fmt: skip
        cut = Profile(tuple(layers))
        best = min(
            literal.chained(cut, network, groups)
            for groups in literal.ordered_partitions(len(cut.layers))
        )
        assert every_fusion(profile, network).predicted_seconds == pytest.approx(best, rel=1e-12)


def test_the_optimum_never_loses_and_no_bound_is_above_a_schedule() -> None:
    for seed in range(300):
        profile, network = case(seed, 7 if seed % 5 else 14)
        names = [name for name in overlap.POLICIES if name != "optimal"]
        made = [overlap.plan(profile, network, name) for name in names]
        if seed % 20 == 0:
            made.append(overlap.plan(profile, network, "optimal", limit_s=0.1))
            least = min(s.predicted_seconds for s in made)
            assert made[-1].predicted_seconds <= least * (1 + 1e-11)
        rng = random.Random(seed)
        made.append(at_random(profile, network, rng))
        for schedule in made:
            bound = schedule.lower_bound_seconds
            assert bound <= schedule.predicted_seconds * (1 + 1e-9), (seed, schedule.policy)
            compute = profile.backward_s + profile.forward_s
            assert bound >= compute * (1 - 1e-12)


def one_run(profile: Profile, c: Communication) -> bool:
    """Whether these are neighbouring bytes of a buffer of all gradients in forward order."""
    starts = [0, *accumulate(x.nbytes for x in profile.layers)]
    spans = sorted((starts[p.layer] + p.first, p.nbytes) for p in c.pieces)
    return all(a + n == b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))


def test_the_optimums_communications_are_one_run_of_a_buffer_each() -> None:
    for seed in range(8):
        profile, network = case(seed)
        for made in _by_two_phases(profile, network):
            assert all(one_run(profile, c) for c in made.communications), seed
    profile, network = overlap.model("resnet152"), overlap.network("10GbE", 32)
    assert network.gamma < 2  # so that all is cut for several lanes
    made = overlap.plan(profile, network, "optimal", limit_s=0.3)
    assert made.lanes > 1 and all(one_run(profile, c) for c in made.communications)


def at_random(profile: Profile, network: Network, rng: random.Random) -> Schedule:
    """Any pieces of any layers, in any order, on up to three lanes; some are scattered, and at last
    gathered."""
    pieces = []
    for i, layer in enumerate(profile.layers):
        inside = (rng.randint(0, layer.nbytes) // 16 * 16 for _ in range(2))
        cuts = sorted({0, layer.nbytes, *inside})
        pieces += [Piece(i, a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    rng.shuffle(pieces)
    sends: list[Communication] = []
    while pieces:
        take = rng.randint(1, 3)
        kind = rng.choice((ALL_REDUCE, ALL_REDUCE, REDUCE_SCATTER))
        streamed = kind == ALL_REDUCE and rng.random() < 0.4
        some = tuple(pieces[:take])
        sends.append(Communication(some, rng.randrange(3), (), streamed, kind))
        del pieces[:take]
    scattered = [(n, c) for n, c in enumerate(sends) if c.kind == REDUCE_SCATTER]
    rng.shuffle(scattered)
    for n, c in scattered:
        sends.append(Communication(c.pieces, rng.randrange(3), (n,), kind=ALL_GATHER))
    return Schedule("random", profile, network, tuple(sends), rng.random() < 0.7)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has 500 looks at the clock in a second, however busy the machine is."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 500)
    module = importlib.import_module("linkweave.collectives.overlap.policies.optimal")
    monkeypatch.setattr(module, "time", clock)


def test_auto_is_never_slower_than_a_named_policy(ticking: None) -> None:
    for name, net in (("vgg16", "10GbE"), ("resnet50", "10GbE-dear"), ("bert-base", "56GbIB")):
        profile, network = overlap.model(name), overlap.network(net, 32)
        auto = overlap.plan(profile, network, limit_s=0.5)
        for policy in overlap.POLICIES:
            options = {"limit_s": 0.1} if policy == "optimal" else {}
            other = overlap.plan(profile, network, policy, **options)
            if policy != "optimal":
                assert auto.predicted_seconds <= other.predicted_seconds * (1 + 1e-11), policy


@pytest.mark.parametrize("name", ["resnet152", "bert-base"])
def test_where_mg_wfbps_rule_collapses_auto_is_at_least_a_fifth_faster(
    name: str, ticking: None
) -> None:
    profile, network = overlap.model(name), overlap.network("10GbE-dear", 64)
    merged = mg_wfbp(profile, network)
    assert len(merged.communications) <= 3
    auto = overlap.plan(profile, network, limit_s=1.0)
    assert auto.predicted_seconds * 1.2 <= merged.predicted_seconds


# ---- the timeline --------------------------------------------------------------------------------
def test_what_is_sent_on_after_the_step_is_not_of_it() -> None:
    """The last bytes were used by a forward pass that has ended before this rank sent its own."""
    line = StepTimeline(8.0, 3.0, ((1.0, 9.0),), ((0.0, 2.0),), ((5.0, 8.0),))
    assert line.communication_s == 7 and line.hidden_s == 1 + 3
    assert line.communication_s - line.hidden_s == line.exposed_s


def test_two_at_once_take_turns_at_gammas_pace() -> None:
    profile = Profile((Layer("a", 1000, 0.0, 0.0), Layer("b", 1000, 0.0, 1.0)))
    network = Network(1.0, 1e-3, 1.5, 8)
    sends = (Communication((Piece(1, 0, 1000),), 0), Communication((Piece(0, 0, 1000),), 1))
    both = Schedule("both", profile, network, sends)
    # start-ups from 1 to 2 s, then 1000 bytes each at 1.5 ms a byte
    assert both.timeline.sends == ((1.0, pytest.approx(3.5)), (1.0, pytest.approx(3.5)))
    late = Schedule("late", profile, network, (sends[0], Communication(sends[1].pieces, 1, (0,))))
    assert late.timeline.sends == ((1.0, 3.0), (3.0, 5.0))
    assert both.predicted_seconds < late.predicted_seconds == 5.0


def test_lanes_are_those_of_a_clock_that_is_stepped() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(2, 6))]
        layers = tuple(Layer(f"{i}", n, 0.0, rng.randint(0, 3)) for i, n in enumerate(sizes))
        profile, startup = Profile(layers), float(rng.randint(0, 3))
        gamma = rng.choice([1.0, 1.5, 2.0])
        sends, plain = [], []
        for number, i in enumerate(rng.sample(range(len(sizes)), len(sizes))):
            lane, after = rng.randrange(3), tuple(rng.sample(range(number), min(number, seed % 2)))
            sends.append(Communication((Piece(i, 0, sizes[i]),), lane, after))
            plain.append((profile.ready[i], float(sizes[i]), lane, after))
        found = Schedule("s", profile, Network(startup, 1.0, gamma, 8), tuple(sends)).timeline.sends
        want = literal.spans_by_small_steps(plain, startup, gamma, 1 / 64)
        for a, b in zip(found, want, strict=True):
            assert a == pytest.approx(b, abs=0.25), seed


def test_streamed_pieces_come_at_the_pace_of_their_time() -> None:
    """While another lane transmits, the first pieces take longer than the later ones."""
    layers = (Layer("a", 64, 0.0, 0.0), Layer("b", 48, 100.0, 0.0), Layer("c", 32, 0.0, 0.0))
    profile, network = Profile(layers), Network(0.0, 1.0, 2.0, 8)
    sends = (
        Communication((Piece(0, 0, 64), Piece(2, 0, 32)), 0, (), True),
        Communication((Piece(1, 0, 48),), 1),
    )
    made = Schedule("s", profile, network, sends, True)
    # both at half the pace until b is there, at 96; a is at 48 of 64 bytes then
    assert made.timeline.sends == ((0.0, pytest.approx(144)), (0.0, pytest.approx(96)))
    assert made.timeline.forward[1] == (pytest.approx(112), pytest.approx(212))
    assert made.lower_bound_seconds <= made.predicted_seconds


def test_halves_of_an_all_reduce() -> None:
    """Each takes half of its start-up and of its bytes; only the gathers let layers go on."""
    profile = Profile((Layer("a", 160, 1.0, 2.0), Layer("b", 320, 1.0, 4.0)))
    made = overlap.plan(profile, Network(1.0, 0.01, 2.0, 8), "dear", bucket=320)
    assert [(c.kind, [p.layer for p in c.pieces]) for c in made.communications] == [
        (REDUCE_SCATTER, [1]), (REDUCE_SCATTER, [0]), (ALL_GATHER, [0]), (ALL_GATHER, [1])
    ]  # fmt: skip
    ends = [(4.0, 6.1), (6.1, 7.4), (7.4, 8.7), (8.7, 10.8)]
    assert made.timeline.sends == near(ends)
    assert made.timeline.forward == near([(8.7, 9.7), (10.8, 11.8)])
    assert made.all_reduces == 2 and "2 all-reduces, whose start-ups take 2000.00" in made.explain()
    assert Schedule.from_json(made.to_json()) == made


def test_halves_on_two_lanes_share_the_network() -> None:
    """A scatter from 2 and one from 4 begin to transmit half a second later, and slow each other
    down until the first is over."""
    profile = Profile((Layer("a", 160, 0.0, 2.0), Layer("b", 640, 0.0, 2.0)))
    a, b = (Piece(0, 0, 160),), (Piece(1, 0, 640),)
    sends = (
        Communication(b, 0, kind=REDUCE_SCATTER), Communication(a, 1, kind=REDUCE_SCATTER),
        Communication(a, 1, kind=ALL_GATHER), Communication(b, 1, (0,), kind=ALL_GATHER),
    )  # fmt: skip
    made = Schedule("mine", profile, Network(1.0, 0.01, 2.0, 8), sends, True)
    # of b's 320 bytes, 120 are left at 4.5 where a's 80 begin; both take 1.6 s, b 0.4 more
    ends = [(2.0, 6.5), (4.0, 6.1), (6.1, 7.4), (7.4, 11.1)]
    assert made.timeline.sends == near(ends)


# ---- simple cases --------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", overlap.POLICIES)
def test_simple_cases(policy: str) -> None:
    options = {"limit_s": 0.2} if policy == "optimal" else {}
    one = Profile((Layer("only", 100, 1.0, 2.0),))
    made = overlap.plan(one, Network(0.5, 0.01, 2.0, 4), policy, **options)
    assert made.predicted_seconds == pytest.approx(2.0 + 0.5 + 1.0 + 1.0)
    assert made.lower_bound_seconds == pytest.approx(4.5)
    free = Network(0.0, 0.0, 1.0, 1)
    profile, _ = case(3)
    made = overlap.plan(profile, free, policy, **options)
    assert made.predicted_seconds == pytest.approx(profile.backward_s + profile.forward_s)


def test_jackson_by_hand() -> None:
    profile = Profile((Layer("a", 10, 1.0, 1.0), Layer("b", 30, 1.0, 1.0)))
    # b from 1 on; a breaks in at 2 for 1 s; b ends at 5, and its forward pass at 6
    assert jackson(profile, 0.0, 0.1) == pytest.approx(6.0)
    assert jackson(profile, 0.5, 0.1) == pytest.approx(6.5)
