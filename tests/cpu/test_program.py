"""Programs, the buffers' layout, profiles of passes: what `DataParallel` computes with no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from training_models import SLOW, error_of, images, made, profile, sentences, units

from linkweave.collectives import overlap
from linkweave.collectives.overlap import Communication, Layer, Network, Piece, Profile, Schedule
from linkweave.collectives.overlap.communication import ALL_GATHER
from linkweave.collectives.overlap.measure import Pass, profile_of
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.gradient_buffers import GradientBuffers, Slot, slots_of
from linkweave.collectives.training.program import Op, Program, Span, after_backward, program_of
from linkweave.collectives.training.tuner import unstreamed


def unit(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Unit:
    parameters = tuple(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    return Unit("gate", tuple(f"p{i}" for i in range(len(shapes))), parameters)


def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((count,), 7, dtype=dtype, device=device)


# ---- units -------------------------------------------------------------------------------------
def test_units_are_in_the_order_of_the_forward_pass() -> None:
    found = units(made("transformer"), sentences(0, 2)[0])
    assert [(u.name, u.names) for u in found] == [
        ("embedding", ("embedding.weight",)),  # tied, and the embedding is first
        ("attention", ("attention.in_proj_weight", "attention.in_proj_bias",
                       "attention.out_proj.weight", "attention.out_proj.bias")),
        ("norm", ("norm.weight", "norm.bias")), ("decoder", ("decoder.bias",)),
    ]  # fmt: skip
    found = units(made("partial"), images(0, 2)[0])
    assert [(u.name, u.names) for u in found] == [
        ("the model", ("unused.weight", "unused.bias")), ("the model", ("scale",)),
        ("last", ("last.weight", "last.bias")),
    ]  # fmt: skip


def test_units_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1].bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight) + model[1].bias
    found = units(model, torch.zeros(1, 2))
    assert [(u.name, u.names, u.dtype) for u in found] == [
        ("0", ("0.weight", "0.bias"), torch.float32), ("1", ("1.weight",), torch.float32),
        ("1", ("1.bias",), torch.float64),
    ]  # fmt: skip


def test_complex_parameters_are_refused() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert "parameter weight is complex" in error_of(
        lambda: units(model, torch.zeros(1, 2, dtype=torch.complex64))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    found = unit(dtype, (2, 3), (), (0, 4))  # three flags, 6 elements, 1, none
    step = 16 // dtype.itemsize
    first = -(-3 // step) * step
    want = (first, first + -(-6 // step) * step)
    assert found.offsets() == (*want, want[1] + step, want[1] + step)
    assert found.nbytes == found.offsets()[-1] * dtype.itemsize
    assert found.nbytes % 16 == 0


# ---- the buffers -------------------------------------------------------------------------------
def test_slots_of_units_in_two_buffers() -> None:
    rows = [unit(torch.float32, (4,)), unit(torch.float64, (2,)), unit(torch.float32, (5,))]
    assert slots_of(rows) == [Slot(0, 0, 32), Slot(1, 0, 32), Slot(0, 32, 48)]
    gradients = GradientBuffers(rows, empty)
    assert [(b.numel(), b.dtype) for b in gradients.buffers] == [
        (20, torch.float32), (4, torch.float64)
    ]  # fmt: skip
    assert not any(buffer.any() for buffer in gradients.buffers)  # whatever `empty` gives


def test_gradients_are_copied_to_the_buffers() -> None:
    one = unit(torch.float32, (2, 3), (2,))
    gradients = GradientBuffers([one], empty)
    weight, bias = one.parameters
    weight.grad = torch.arange(6.0).reshape(2, 3)
    gradients.collect(0)
    assert gradients.buffers[0].tolist() == [1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0]
    assert weight.grad.data_ptr() != gradients.buffers[0][4:].data_ptr()
    assert bias.grad is None
    assert [g is None for _, g in gradients.of(0)] == [False, True]
    gradients.seal()
    assert not gradients.changed()
    bias.grad = torch.ones(2)
    assert gradients.changed()
    bias.grad = None
    gradients.raw(0, 0, 16).fill_(1)  # what a lane does
    assert not gradients.changed()
    assert all(g is not None for _, g in gradients.of(0))
    weight.grad.mul_(2)
    assert gradients.written(0)
    gradients.seal()
    weight.grad = weight.grad.clone()
    assert gradients.changed()
    assert not gradients.written(0)


def a_pass(gradients: GradientBuffers, value: float, own: torch.Tensor | None = None) -> Any:
    """A backward pass that finds no `grad`, or the user's own. Returns `grad` on averages."""
    (weight,) = gradients.units[0].parameters
    weight.grad = torch.ones(2, 3) if own is None else own.view(2, 3)
    gradients.collect(0)
    gradients.raw(0, 16, 40).fill_(value)  # what a lane does
    gradients.show()
    return weight.grad


def test_gradients_are_the_user_s() -> None:
    """Kept ones, views of them and a tensor of the user's own keep what they had."""
    gradients = GradientBuffers([unit(torch.float32, (2, 3))], empty)
    (weight,) = gradients.units[0].parameters
    own = torch.zeros(6)
    first = a_pass(gradients, 1)
    second = a_pass(gradients, 2).flatten()
    third = a_pass(gradients, 3).numpy()
    assert a_pass(gradients, 4, own).data_ptr() == own.data_ptr()
    weight.grad = None
    gradients.collect(0)  # a parameter that is not used
    assert [x.tolist() for x in (first, second, third, own)] == [
        [[1] * 3] * 2, [2] * 6, [[3] * 3] * 2, [4] * 6
    ]  # fmt: skip


@pytest.mark.parametrize("dropped", [False, True])
def test_a_gradient_is_lent_to_an_update(dropped: bool) -> None:
    """Whoever keeps what was collected gets the average, also if it is no parameter's any more."""
    gradients = GradientBuffers([unit(torch.float32, (2, 3))], empty)
    (weight,) = gradients.units[0].parameters
    kept = weight.grad = torch.ones(2, 3)
    gradients.collect(0)
    gradients.seal()
    if dropped:
        weight.grad = None
    gradients.raw(0, 16, 40).fill_(5)
    with gradients.lent(0):
        assert weight.grad.data_ptr() == gradients.buffers[0][4:].data_ptr()
        assert weight.grad.eq(5).all() and kept.eq(1).all()
    assert weight.grad is (None if dropped else kept)
    assert kept.eq(5).all()


def test_parts_of_buffers_have_the_memory_format_of_parameters() -> None:
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    one = Unit("conv", ("weight",), (conv.weight,))
    gradients = GradientBuffers([one], empty)
    conv.weight.grad = torch.randn(4, 3, 2, 2)
    want = conv.weight.grad.clone()
    gradients.collect(0)
    ((_, part),) = gradients.of(0)
    assert torch.equal(part, want)
    assert part.stride() == conv.weight.stride() == (12, 1, 6, 3)


# ---- programs ----------------------------------------------------------------------------------
def test_program_of_a_schedule_on_two_buffers() -> None:
    layers = Profile(
        tuple(Layer(name, nbytes, 0, 0) for name, nbytes in zip("abc", (32, 48, 64), strict=True))
    )
    sends = (
        Communication((Piece(2, 16, 48), Piece(0, 0, 32), Piece(1, 0, 16)), 1),
        Communication((Piece(2, 0, 16),), 0, (0,)),
        Communication((Piece(1, 16, 32),), 1, (1,), True),
    )
    schedule = Schedule("mine", layers, SLOW, sends, True)
    slots = [Slot(0, 0, 32), Slot(1, 0, 48), Slot(0, 32, 64)]
    program = program_of(schedule, slots, "abc")
    assert program.ops == (
        Op(0, (Span(0, 0, 32), Span(2, 48, 96)), 1), Op(1, (Span(1, 0, 16),), 1),
        Op(0, (Span(2, 32, 48),), 0, (0, 1), source=1),
        Op(1, (Span(1, 16, 48),), 1, (2,), True, 2),
    )  # fmt: skip
    assert program.ops[0].runs == [(0, 32), (48, 96)]
    assert program.ops[0].needs == (0, 2)
    assert program.ops[0].nbytes == 80
    assert (program.lanes, program.chained, program.label(0)) == (2, True, "a to c (2)")
    assert "2 lane 0          16 bytes  c after 0, 1" in str(program)
    assert program_of(schedule, slots, "abc").checksum == program.checksum
    for other in (replace(program, chained=False), replace(program, ops=program.ops[::-1])):
        assert other.checksum != program.checksum


def test_spans_of_neighbours_are_one_run_only_in_their_order() -> None:
    op = Op(0, (Span(0, 0, 16), Span(1, 16, 48), Span(3, 64, 80)))
    assert op.runs == [(0, 48), (64, 80)]
    assert Op(0, (Span(1, 16, 48), Span(0, 0, 16)), streamed=True).runs == [(16, 48), (0, 16)]


def test_after_backward() -> None:
    program = after_backward([Slot(0, 0, 32), Slot(1, 0, 48), Slot(0, 32, 64)], "abc")
    assert program.ops == (Op(0, (Span(0, 0, 32), Span(2, 32, 96))), Op(1, (Span(1, 0, 48),)))
    assert program.ops[0].runs == [(0, 96)]
    first, *_ = str(program).splitlines()
    assert first == "after-backward: 2 all-reduces after the backward pass"


def test_a_schedule_for_another_model_is_refused() -> None:
    schedule = overlap.plan(profile(made("cnn"), images(0, 2)[0]), SLOW, "wfbp")
    said = error_of(lambda: program_of(schedule, [Slot(0, 0, 272)], ["first"]))
    assert "the schedule is for 3 layers of 2560 bytes; the model has 1 units of 272 bytes" in said


@pytest.mark.parametrize("name", ["cnn", "transformer", "partial"])
@pytest.mark.parametrize("policy", overlap.POLICIES)
def test_programs_send_every_byte_once(name: str, policy: str) -> None:
    inputs = sentences(0, 2)[0] if name == "transformer" else images(0, 2)[0]
    found = units(made(name), inputs)
    options = {"limit_s": 0.02} if policy == "optimal" else {}
    schedule = overlap.plan(profile(made(name), inputs), SLOW, policy, **options)
    for one in (schedule, unstreamed(schedule)):
        program = program_of(one, slots_of(found), [u.name for u in found])
        reduced = sum(op.nbytes for op in program.ops if op.kind != ALL_GATHER)
        gathered = sum(op.nbytes for op in program.ops if op.final)
        assert reduced == gathered == sum(u.nbytes for u in found)
        assert all(n < i for i, op in enumerate(program.ops) for n in op.after)


def test_unstreamed() -> None:
    """A start-up may take a twentieth of a part: parts of at least 20 bytes here."""
    layers = Profile(tuple(Layer(str(i), 16, 0, 0) for i in range(5)))
    first = Communication(tuple(Piece(i, 0, 16) for i in (0, 1, 2, 3)), 1, (), True)
    last = Communication((Piece(4, 0, 16),), 0, (0,))
    schedule = Schedule("mine", layers, Network(1e-6, 1e-6), (first, last), True)
    found = unstreamed(schedule).communications
    assert found == (
        Communication((Piece(0, 0, 16), Piece(1, 0, 16)), 1),
        Communication((Piece(2, 0, 16), Piece(3, 0, 16)), 1),
        Communication((Piece(4, 0, 16),), 0, (0, 1)),
    )
    plain = replace(schedule, communications=(replace(first, streamed=False), last))
    assert unstreamed(plain) == plain


# ---- profiles ----------------------------------------------------------------------------------
def test_profile_of_passes() -> None:
    """Medians; the update is divided by bytes; a unit without a gradient takes no time."""
    passes = [
        Pass((10.0, 11.0, 13.0, 16.0), (9.0, None, 4.0), 6.0),
        Pass((0.0, 1.0, 3.0, 6.0), (7.0, 5.0, 4.0), 6.0),
        Pass((0.0, 9.0, 9.5, 99.0), (8.0, 1.0, 2.0), 6.0),
    ]
    found = profile_of("abc", [10, 20, 30], passes, "mine")
    assert [layer.nbytes for layer in found.layers] == [10, 20, 30]
    assert [layer.forward_s for layer in found.layers] == [1.0 + 1, 2.0 + 2, 3.0 + 3]
    # backward: (5, 0, 4), (2, 1, 4) and (6, 0, 2)
    assert [layer.backward_s for layer in found.layers] == [5.0, 0.0, 4.0]
    assert found.name == "mine"
    assert "at least one measured step" in error_of(lambda: profile_of("a", [1], [], "none"))


def test_the_names_of_a_program_are_part_of_it() -> None:
    ops = (Op(0, (Span(0, 0, 16),)),)
    assert Program("a", ops, ("x",)).checksum != Program("a", ops, ("y",)).checksum
