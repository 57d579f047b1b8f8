"""`prefetch`: batches of any structure know the next one, and only that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from linkweave import prefetch
from linkweave.collectives.training.embedding.prefetch import has_next, next_of


def ids(n: int) -> torch.Tensor:
    return torch.full((3,), n)


def walked(loader: Any) -> list[Any]:
    """The batches, each with what its tensors know while it is trained with."""
    return [(batch, [known(x) for x in tensors(batch)]) for batch in prefetch(loader)]


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch
    return [x for item in items if not isinstance(item, str) for x in tensors(item)]


def known(x: torch.Tensor) -> Any:
    """Of the next batch: the number in its tensor, None at the end, "-" if it is of no batch."""
    if not has_next(x):
        return "-"
    found = next_of(x)
    return None if found is None else int(found[0])


def test_batches_are_the_loaders() -> None:
    batches = [ids(n) for n in range(4)]
    for loader in (batches, tuple(batches), iter(batches), (batch for batch in batches)):
        found = walked(loader)
        assert all(x is y for (x, _), y in zip(found, batches, strict=True))
        assert [knows for _, knows in found] == [[1], [2], [3], [None]]
        assert not any(map(has_next, batches))


@pytest.mark.parametrize(
    "made",
    [
        lambda n: (ids(n), ids(n + 10)), lambda n: [ids(n), [ids(n + 10)]],
        lambda n: {"source": ids(n), "name": "x", "target": ids(n + 10)},
        lambda n: ({"source": ids(n)}, (ids(n + 10),)),
    ],
)  # fmt: skip
def test_tensors_know_that_in_their_position(made: Any) -> None:
    found = walked([made(n) for n in range(3)])
    assert [knows for _, knows in found] == [[1, 11], [2, 12], [None, None]]


def test_other_tensors_know_nothing() -> None:
    batches = [(ids(n), torch.ones(2), ids(n).bool(), ids(n).int()) for n in range(2)]
    assert [knows for _, knows in walked(batches)] == [[1, "-", "-", 1], [None, "-", "-", None]]
    mixed = [(ids(0), ids(1)), (ids(2), torch.ones(2)), (ids(3),), (ids(4), ids(5))]
    assert [knows for _, knows in walked(mixed)] == [[2, None], [None, "-"], [None], [None, None]]


def test_a_batch_that_comes_again() -> None:
    """A list of the same batch, and one whose batches share tensors."""
    same = ids(7)
    assert [knows for _, knows in walked([same] * 3)] == [[7], [7], [None]]
    assert not has_next(same)
    found = walked([(same, ids(n)) for n in range(3)])
    assert [knows for _, knows in found] == [[7, 1], [7, 2], [None, None]]


def test_what_is_made_of_a_tensor_knows_nothing() -> None:
    for batch in prefetch([ids(0), ids(1)]):
        assert has_next(batch)
        assert not any(map(has_next, (batch[:2], batch.clone(), batch.int(), batch.view(3, 1))))


def test_no_batches_and_one() -> None:
    assert walked([]) == []
    assert walked(iter(())) == []
    assert [knows for _, knows in walked([ids(0)])] == [[None]]


def test_lengths_and_iterations() -> None:
    batches = [ids(n) for n in range(3)]
    loader = torch.utils.data.DataLoader(torch.arange(7), batch_size=2)
    assert [len(prefetch(x)) for x in (batches, [], loader)] == [3, 0, 4]
    again = prefetch(loader)
    for _ in range(2):
        assert torch.equal(torch.cat([*again]), torch.arange(7))
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter(batches)))
    once = prefetch(iter(batches))
    assert [len([*once]) for _ in range(2)] == [3, 0]


def test_one_batch_is_read_ahead() -> None:
    read = []

    def loader() -> Iterator[torch.Tensor]:
        for n in range(4):
            read.append(n)
            yield ids(n)

    counts = [len(read) for _ in prefetch(loader())]
    assert counts == [2, 3, 4, 4]


def test_a_loop_that_is_left_and_a_loader_that_raises() -> None:
    batches = [ids(n) for n in range(4)]
    for batch in prefetch(batches):
        if int(batch[0]) == 1:
            break
    assert [knows for _, knows in walked(batches)] == [[1], [2], [3], [None]]

    def loader() -> Iterator[torch.Tensor]:
        yield batches[0]
        yield batches[1]
        raise OSError("no such file")

    seen = []
    with pytest.raises(OSError, match="no such file"):
        for batch in prefetch(loader()):
            seen.append(int(batch[0]))
    assert seen == [0]
