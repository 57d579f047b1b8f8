"""Decode with a small GPT whose layers are split over ranks by DTensor.

    torchrun --nproc-per-node 2 examples/decode.py --backend linkweave

Tensor parallelism sends two all-reduces of one row for each layer and token, so that a token waits
for their latency. Every rank decodes the same text, which one rank alone decodes as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

import linkweave  # noqa: F401  (makes the backend known where the package is not installed)

CHARACTERS, CONTEXT, HEAD = 256, 128, 64
SPLIT = {"attend": ColwiseParallel(), "project": RowwiseParallel(),
         "think.0": ColwiseParallel(), "think.2": RowwiseParallel()}  # fmt: skip


class Block(nn.Module):
    """Attention to earlier characters, whose keys and values are kept; then a layer on each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        # a rank has all of a head: [1, 3 * width / ranks] to [heads / ranks, 1, 3 * HEAD]
        found = self.attend(self.before(x)).view(-1, 1, 3 * HEAD)
        query, *new = found.split(HEAD, -1)
        kept[:] = [torch.cat(pair, 1) for pair in zip(kept, new, strict=True)] if kept else new
        seen = scaled_dot_product_attention(query, *kept)
        x = x + self.project(seen.view(1, -1))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """Predicts the next character from the last one and what is kept of those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    @torch.no_grad()
    def decode(self, first: int, tokens: int) -> list[int]:
        """The characters after `first`, each the likeliest one."""
        kept: list[list[Tensor]] = [[] for _ in self.blocks]
        found, place = torch.tensor([first]), torch.arange(CONTEXT)
        said = []
        for at in range(tokens):
            x = self.character(found) + self.position(place[at : at + 1])
            for block, cache in zip(self.blocks, kept, strict=True):
                x = block(x, cache)
            found = self.last(x).argmax(-1)
            said.append(int(found))
        return said


def model_of(width: int, layers: int) -> GPT:
    torch.manual_seed(0)  # on all ranks and for all backends: the same weights
    return GPT(width, layers).eval()


def split(model: GPT) -> GPT:
    """Split the layers of each block over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, SPLIT)
    return model


def measure(width: int, layers: int, tokens: int, rounds: int) -> list[float]:
    """Tokens per second in each round. Raises RuntimeError if the ranks together decode other ones
    than this rank alone."""
    model, wanted = split(model_of(width, layers)), model_of(width, layers).decode(1, tokens)
    rates = []
    for _ in range(rounds + 1):  # the first one is not timed
        dist.barrier()
        start = time.perf_counter()
        said = model.decode(1, tokens)
        rates.append(tokens / (time.perf_counter() - start))
        if said != wanted:
            raise RuntimeError(f"the ranks decode {said}, one rank {wanted}")
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("linkweave", "gloo"), default="linkweave")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32, choices=range(1, CONTEXT + 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", action="store_true", help="run under SCHED_BATCH")
    options = parser.parse_args()
    if options.batch:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rates = measure(options.width, options.layers, options.tokens, options.rounds)
    if dist.get_rank() == 0:
        print(f"{statistics.median(rates):.1f} tokens/s over {options.backend}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
