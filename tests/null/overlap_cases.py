"""Random cases of gradient communication."""

from __future__ import annotations

import random

from linkweave.collectives.overlap import Layer, Network, Profile


def case(seed: int, most: int = 12) -> tuple[Profile, Network]:
    """Random layers and a random network, of which some have equal times, no start-up or no end
    of bandwidth."""
    rng = random.Random(seed)
    count = rng.randint(1, most)
    equal = rng.random() < 0.2
    layers = tuple(
        Layer(f"layer {i}", rng.choice([4, 1000, rng.randint(1, 10**7)]),
              1e-3 if equal else rng.uniform(0, 4e-3), 2e-3 if equal else rng.uniform(0, 8e-3))
        for i in range(count)
    )  # fmt: skip
    startup = rng.choice([0.0, 1e-4, 1e-3, 5e-3])
    pace = rng.choice([0.0, 1e-10, 1e-9, 5e-9])
    return Profile(layers), Network(startup, pace, rng.choice([1.0, 1.5, 2.0]), 8)
