"""What waits for what on a GPU: the picture of the documentation, as text."""

from __future__ import annotations

from tests.cpu.event_graphs import chained_step, gtopk_step, row_step


def test_a_step_of_gtopk() -> None:
    graph = gtopk_step()
    each = ["select", "send", "broadcast", "keep", "scatter"]
    for lane in ("lane 0", "lane 1"):
        assert [what for stream, what in graph.items if stream == lane] == each
    assert graph.arrows == [
        "main stream: backward 1 > lane 0: select",
        "main stream: backward 0 > lane 1: select",
        "lane 0: scatter > main stream: flags",
        "lane 1: scatter > main stream: flags",
        "main stream: flags > host waits: reads: skip?",
        "host waits: reads: skip? > main stream: step",
    ]


def test_a_step_of_an_embedding() -> None:
    """The host reads the number of tokens when the backward pass has been enqueued, and that of
    prior rows at the step; the next forward pass waits for its rows, not for delayed ones."""
    graph = row_step()
    lane = [what for stream, what in graph.items if stream == "lane 0"]
    assert lane == ["tokens", "tokens", "prior", "update rows", "look up", "lookup", "delayed",
                    "update rows"]  # fmt: skip
    assert graph.arrows == [
        "main stream: forward > lane 0: tokens",
        "lane 0: tokens > host waits: reads lengths",
        "host waits: reads lengths > lane 0: tokens",
        "lane 0: tokens > host waits: reads lengths",
        "main stream: backward > lane 0: prior",
        "host waits: reads lengths > lane 0: prior",
        "main stream: backward > lane 0: update rows",
        "main stream: backward > lane 0: look up",
        "main stream: backward > lane 0: delayed",
        "lane 0: tokens > main stream: next forward",
        "lane 0: lookup > main stream: next forward",
    ]


def test_a_chained_step() -> None:
    assert chained_step().arrows == [
        "main stream: backward 1 > lane 0: all-reduce",
        "main stream: backward 0 > lane 1: all-reduce",
        "lane 1: all-reduce > main stream: update 0",
        "lane 0: all-reduce > main stream: update 1",
    ]
