"""`linkweave bench gtopk --accuracy`: a CNN that trains beside padding."""

from __future__ import annotations

from typing import Any

import pytest
from test_distributed import run

from linkweave.bench import gtopk_accuracy
from linkweave.bench.ddp import send_nothing
from linkweave.bench.gtopk_accuracy import HOOKS, INTERVAL, rows
from linkweave.bench.tasks import TASKS
from tests.cpu.commands import command

CNN = sum(p.numel() for p in TASKS["digits"](0).model().parameters())
VALUES = 500_000  # of which the padding fills DDP's first bucket, of 1 MiB


def buckets(rank: int) -> list[int]:
    """The elements of the buckets of each step."""
    found: list[int] = []

    def recorded(state: Any, bucket):  # DDP refuses annotations that are text
        found.append(bucket.buffer().numel())
        return send_nothing(state, bucket)

    gtopk_accuracy._trained(lambda: (None, recorded), VALUES, accuracy=0.0)
    return found


def test_the_padding_has_a_bucket_of_its_own() -> None:
    """From the second step: in the first one, DDP has one bucket for all."""
    steps = [VALUES, *[VALUES - CNN, CNN] * (INTERVAL - 1)]
    assert run(2, buckets, backend="gloo") == [steps] * 2


def trained(rank: int, values: int, accuracy: float) -> list[Any]:
    return [
        (row.hook, row.values, row.ranks, row.density, row.accuracy, row.steps)
        for row in rows(values, 0.01, accuracy)
    ]


def test_all_train_until_the_accuracy_is_reached() -> None:
    """As long beside any padding, as the CNN's entries and their order are the same."""
    found = run(2, trained, VALUES, 0.3, backend="gloo")
    assert found[0] == found[1]
    for (*who, accuracy, steps), (name, density) in zip(
        found[0], zip(HOOKS, (1.0, 0.01), strict=True), strict=True
    ):
        assert who == [name, VALUES, 2, density]
        assert accuracy >= 0.3 and steps % INTERVAL == 0
    other = run(2, trained, 2 * VALUES, 0.3, backend="gloo")
    assert [row[-2:] for row in other[0]] == [row[-2:] for row in found[0]]


def test_training_ends_after_the_most_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gtopk_accuracy, "MOST", 2 * INTERVAL)
    for row in run(2, trained, VALUES, 1.0, backend="gloo")[0]:
        assert row[-1] == 2 * INTERVAL and row[-2] < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--accuracy 95", "--accuracy must be above 0 and at most 1, not 95"),
        ("--accuracy 0", "--accuracy must be above 0 and at most 1, not 0"),
        ("--accuracy 0.9 --hook fp16", "--hook does not go with --accuracy"),
        ("--accuracy 0.9 --model resnet19", "--model must be one of vgg16, resnet20, resnet18"),
        ("--accuracy 0.9 --density 2", "--density must be above 0 and at most 1, not 2"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str) -> None:
    done = command("bench", "gtopk", *words.split())
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
