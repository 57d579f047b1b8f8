"""Where residuals gather when gTop-k's merges keep what they drop, on many ranks in one process."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from linkweave.bench.training.convergence import batches
from linkweave.bench.training.tasks import TASKS
from linkweave.collectives.planning.sparse_tree import binomial_tree, rounds
from linkweave.kernels import gtopk

DENSITY, STEPS = 0.01, 100


def pile_up(ranks: int, conserve: bool) -> float:
    """The largest L1 norm of a rank's residual over their mean, after STEPS steps of SGD.

    conserve: what a merge cuts of an index of the result goes to the residual of the rank that
    merges; else it is lost (Shi et al., algorithm 4). The tree's root is rank 0 in all steps.
    """
    task = TASKS["digits-mlp"](0)
    torch.manual_seed(0)
    model = task.model()
    x, y = (torch.from_numpy(part) for part in task.train)
    numel = sum(p.numel() for p in model.parameters())
    k = max(1, int(DENSITY * numel))
    residuals = torch.zeros(ranks, numel)
    tree = [*rounds(binomial_tree(ranks))]
    drawn = batches(len(x), task.batch, 0)
    for _ in range(STEPS):
        own = []
        for rank, mine in enumerate(next(drawn).chunk(ranks)):
            model.zero_grad()
            cross_entropy(model(x[mine]), y[mine].flatten()).backward()
            grads = (p.grad for p in model.parameters())
            gradient = torch.cat([grad.flatten() for grad in grads if grad is not None])
            own.append(gtopk.vector_of(*gtopk.select(gradient, residuals[rank], k)))
        held, cut = [*own], [list[torch.Tensor]() for _ in own]
        for pairs in tree:
            for source, target in pairs:
                held[target], dropped = gtopk.merge(held[target], held[source], k)
                cut[target].append(dropped)
        found = held[0]
        for rank, vector in enumerate(own):
            gtopk.keep(vector, found, residuals[rank])
            for dropped in cut[rank] if conserve else ():
                gtopk.keep(dropped, found, residuals[rank], arrived=True)
        step = torch.zeros(numel)
        gtopk.scatter(found, step, ranks)
        with torch.no_grad():
            at = 0
            for p in model.parameters():
                p -= task.rate * step[at : at + p.numel()].view_as(p)
                at += p.numel()
    norms = residuals.abs().sum(1)
    return float(norms.max() / norms.mean())
