"""Train data-parallel in plain PyTorch, with one word changed: the name of the backend.

    torchrun --nproc-per-node 4 examples/ddp.py --backend linkweave
    torchrun --nproc-per-node 4 examples/ddp.py --backend gloo --model gpt --parallel fsdp

A small CNN learns scikit-learn's digits, or a small GPT the text of this repository's LICENSE.
Every rank draws the same batch and takes its share of it, so that backends and numbers of ranks
differ by rounding only.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from small_models import digits, text
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

import linkweave  # noqa: F401  (makes the backend known where the package is not installed)

BATCH = 32  # over all ranks


def train(rank: int, name: str, parallel: str, steps: int) -> tuple[float, float, bool]:
    """Return loss and accuracy on the held-out tenth, and whether all ranks' weights are equal."""
    torch.manual_seed(0)  # on all ranks: the same weights and batches
    model, x, y = digits() if name == "cnn" else text()
    size, held_out = dist.get_world_size(), len(x) // 10
    if parallel == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks if name == "gpt" else ():
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        mine = torch.randint(len(x) - held_out, (BATCH,))[rank::size]
        optimizer.zero_grad()
        loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        guesses, wanted = model(x[-held_out:]), y[-held_out:]
    accuracy = (guesses.argmax(-1) == wanted).float().mean()
    return loss(guesses, wanted).item(), accuracy.item(), equal_weights(model)


def loss(guesses: Tensor, wanted: Tensor) -> Tensor:
    return nll_loss(guesses.flatten(0, -2), wanted.flatten())


def equal_weights(model: nn.Module) -> bool:
    """Whether all ranks have the same weights, to the bit. FSDP's are gathered for it."""
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    mine = torch.cat([p.detach().flatten() for p in whole]).view(torch.int32)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("linkweave", "gloo"), default="linkweave")
    parser.add_argument("--model", choices=("cnn", "gpt"), default="cnn")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    final, accuracy, equal = train(rank, options.model, options.parallel, options.steps)
    if rank == 0:
        print(f"loss {final:.6f}, accuracy {accuracy:.1%}; all weights equal: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
