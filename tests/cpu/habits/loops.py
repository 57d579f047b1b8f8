"""Habits of the loop itself: order of calls, accumulation, the end, two models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.cpu.habits.run import CLASSES, DENSE, FEW, INPUTS, TWO, Run, habit, made, plain_sgd

NOT_AVERAGED = r"not (been )?averaged|no_sync\(\)"


# ---- order of calls ------------------------------------------------------------------------------
@habit("zero_grad, backward, step")
def plain(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        x, y = run.batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.mean(f"loss {step}", loss)


@habit("zero_grad between forward and backward")
def late_zero(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        loss = run.loss(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@habit("zero_grad after step")
def zero_after_step(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit("model.zero_grad()")
def zero_of_model(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        model.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()


@habit("zero_grad(set_to_none=False) of the optimizer")
def zeros_of_optimizer(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad(set_to_none=False)
        run.loss(model, step).backward()
        optimizer.step()


@habit("zero_grad(set_to_none=False) of the model, after step")
def zeros_of_model(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        run.loss(model, step).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


@habit("p.grad = None for each parameter")
def none_by_hand(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        for p in model.parameters():
            p.grad = None
        run.loss(model, step).backward()
        optimizer.step()


@habit("gradients are never zeroed")
def never_zeroed(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), plain_sgd)
    for step in run.steps:
        run.loss(model, step).backward()
        optimizer.step()


@habit("a batch is dropped after backward")
def dropped(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        run.loss(model, step).backward()
        if step % 5 == 3:
            (model if step % 2 else optimizer).zero_grad()
            continue
        optimizer.step()


@habit("a batch is dropped before backward")
def skipped(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        loss = run.loss(model, step)
        if step % 5 == 3:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@habit("step twice with the same gradients")
def two_steps(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_backward(model, optimizer):
        optimizer.step()  # and again after it


@habit("step with a closure")
def closures(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run.loss(model, step)
            loss.backward()
            return loss

        run.mean(f"loss {step}", optimizer.step(closure))


@habit("the loop ends after a backward pass")
def ends_early(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        run.loss(model, step).backward()
        if step < 14:
            optimizer.step()


@habit("batches of another size in each step")
def sizes(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, batch=lambda step: run.batch(step, 6 * (1 + step % 3)))


@habit("the learning rate is set by hand")
def learning_rate(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        for group in optimizer.param_groups:  # the update may be under way
            group["lr"] = 100.0


@habit("dropout with a seed for each sample")
def dropout(run: Run) -> None:
    model, optimizer = run.wrapped(
        made(
            run, lambda: nn.Sequential(nn.Linear(INPUTS, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
        )
    )
    for step in run.steps:
        x, y = run.batch(step)
        seeds = run.part(torch.arange(6))
        out = []
        for row, seed in zip(x.split(1), seeds.tolist(), strict=True):
            torch.manual_seed(100 * step + seed)
            out.append(model(row))
        optimizer.zero_grad()
        cross_entropy(torch.cat(out), y).backward()
        optimizer.step()


# ---- batches in unequal number -------------------------------------------------------------------
@habit("join() with batches in unequal number", quick=(*FEW, "ddp", "gtopk"))
def uneven(run: Run, model: Any, optimizer: Any) -> None:
    """The average divides by the number of all ranks, as that of DDP."""

    def goes_on(rank: int, step: int) -> bool:
        return step < 16 - 2 * rank

    with run.join(model):
        for step in range(16):
            if not goes_on(run.rank, step):
                break
            optimizer.zero_grad()
            if run.alone:
                x, y = run.whole(step)
                parts = zip(x.chunk(run.ranks), y.chunk(run.ranks), strict=True)
                for rank, (mine, wanted) in enumerate(parts):
                    if goes_on(rank, step):
                        (cross_entropy(model(mine), wanted) / run.ranks).backward()
            else:
                run.loss(model, step).backward()
            optimizer.step()
            run.look()
    run.train(model, optimizer, range(16, 19))


@habit("join() with batches in equal number", quick=FEW)
def even(run: Run, model: Any, optimizer: Any) -> None:
    with run.join(model):
        run.train(model, optimizer)


@habit("join() inside no_sync()", error=r"must not be inside another join", only=DENSE, quick=TWO)
def join_in_no_sync(run: Run, model: Any, optimizer: Any) -> None:
    """All passes of a loop that is joined must be ones that send."""
    with run.no_sync(model), run.join(model):
        run.train(model, optimizer)


# ---- accumulation --------------------------------------------------------------------------------
@habit("accumulation without no_sync")
def accumulated(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        (run.loss(model, step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@habit("accumulation with no_sync")
def accumulated_apart(run: Run, model: Any, optimizer: Any) -> None:
    """The first pass of all is inside as well."""
    for step in run.steps:
        optimizer.zero_grad()
        with run.no_sync(model):
            with run.no_sync(model):
                (run.loss(model, step) / 3).backward()
            (run.loss(model, step + 50) / 3).backward()
        assert run.differs(run.inner(model).fc.weight.grad)
        (run.loss(model, step + 90) / 3).backward()
        optimizer.step()


@habit("no_sync around the backward pass only")
def backward_in_no_sync(run: Run, model: Any, optimizer: Any) -> None:
    """As with DDP the forward pass counts, so these gradients are averaged."""
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        with run.no_sync(model):
            loss.backward()
        optimizer.step()


@habit("no_sync around the forward pass only")
def forward_in_no_sync(run: Run, model: Any, optimizer: Any) -> None:
    """As with DDP its gradients stay on this rank, until the next backward pass averages all."""
    for step in run.steps:
        optimizer.zero_grad()
        with run.no_sync(model):
            loss = run.loss(model, step)
        loss.backward()
        run.loss(model, step + 50).backward()
        optimizer.step()


@habit("step after backward passes in no_sync only", error=NOT_AVERAGED)
def only_no_sync(run: Run, model: Any, optimizer: Any) -> None:
    """The gradients are this rank's own."""
    for step in run.steps:
        optimizer.zero_grad()
        if step == run.middle:
            with run.no_sync(model):
                run.loss(model, step).backward()
        else:
            run.loss(model, step).backward()
        optimizer.step()


@habit("several backward passes of one forward pass")
def several_backward(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        if step % 4 != 2:
            optimizer.step()
    assert run.alone or run.mode.name == "auto" or model.schedule is not None


@habit("one backward pass of several forward passes")
def several_forward(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        (run.loss(model, step) + run.loss(model, step + 50)).backward()
        optimizer.step()


@habit("two forward passes, then two backward passes")
def crosswise(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        first, second = run.loss(model, step), run.loss(model, step + 50)
        first.backward()
        second.backward()
        optimizer.step()


# ---- the end -------------------------------------------------------------------------------------
@habit("close(), then each rank trains the module alone")
def closed(run: Run, model: Any, optimizer: Any) -> None:
    """As close() says; all ranks have the whole batch here."""
    run.train(model, optimizer)
    run.close()
    inner = run.inner(model)
    for step in range(20, 24):
        run.train(inner, optimizer, [step], batch=run.whole)
        with torch.no_grad():
            run.same(f"out {step}", model(run.whole(step)[0]))


@habit("close(), then the wrapper is trained", error="closed", by=1)
def trained_after_close(run: Run, model: Any, optimizer: Any) -> None:
    """Ranks would part without a word."""
    run.train(model, optimizer, range(4))
    run.close()
    run.train(model, optimizer, range(4, 8))


@habit("a second DataParallel after close()")
def again(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(8))
    run.close()
    other = run.wrap(run.inner(model), optimizer)
    run.train(other, optimizer)


@habit("models are dropped without close()", only=("auto", "bytescheduler"))
def without_close(run: Run) -> None:
    """They leave no threads behind."""
    import time
    from threading import active_count

    before = active_count()
    for _ in range(6):
        model, optimizer = run.wrapped(made(run))
        run.train(model, optimizer, range(3))
        run.models.clear()
        del model, optimizer
        import gc

        gc.collect()
    until = time.monotonic() + 60
    while active_count() - before > 1 and time.monotonic() < until:
        time.sleep(0.01)  # the last ones are about to end
    run.same("more threads than one", active_count() - before > 1)


@habit("early stopping: the best state is kept and loaded at the end")
def early_stopping(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        if step == 12:
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)


# ---- two models ----------------------------------------------------------------------------------
def adversaries(run: Run) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, INPUTS))
    critic = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, 1))
    return generator.to(run.dtype), critic.to(run.dtype)


@habit("a GAN that toggles requires_grad_ of its critic")
def toggled_gan(run: Run) -> None:
    made_generator, made_critic = adversaries(run)
    generator, of_generator = run.wrapped(made_generator)
    critic, of_critic = run.wrapped(made_critic)
    for step in run.steps:
        x, z = run.batch(step)[0], run.batch(step + 50)[0][:, :4]
        critic.requires_grad_(True)
        of_critic.zero_grad()
        (critic(generator(z).detach()).mean() - critic(x).tanh().mean()).backward()
        of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (-critic(generator(z)).tanh().mean()).backward()
        of_generator.step()


@habit("a GAN that leaves the critic's gradients behind")
def plain_gan(run: Run) -> None:
    made_generator, made_critic = adversaries(run)
    generator, of_generator = run.wrapped(made_generator)
    critic, of_critic = run.wrapped(made_critic)
    for step in run.steps:
        x, z = run.batch(step)[0], run.batch(step + 50)[0][:, :4]
        of_critic.zero_grad()
        (critic(generator(z).detach()).mean() - critic(x).tanh().mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(z)).tanh().mean()).backward()
        of_generator.step()


@habit("a gradient penalty on inputs")
def penalty(run: Run) -> None:
    _, made_critic = adversaries(run)
    critic, optimizer = run.wrapped(made_critic)
    for step in run.steps:
        x = run.batch(step)[0].requires_grad_()
        optimizer.zero_grad()
        scores = critic(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        (scores.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
