"""Whether CUDA has been started in this process, after which it must not be forked."""

from __future__ import annotations

import pytest

from linkweave.collectives.runtime.gpu.driver import started


class Driver:
    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cuDeviceGetCount(self, count: object) -> int:
        return self.answer


@pytest.mark.parametrize(("answer", "wanted"), [(3, False), (0, True), (100, True)])
def test_the_driver_is_asked_without_starting_it(answer: int, wanted: bool) -> None:
    assert started(Driver(answer)) is wanted


def test_a_library_that_is_not_loaded_is_not_started() -> None:
    assert started() is False
