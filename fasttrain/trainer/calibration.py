"""Forwards and backwards beside the training: nothing of the run moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fasttrain.lazy import np, torch
from fasttrain.trainer.state import rng_tensors, set_rng

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer


@contextmanager
def undisturbed(trainer: Trainer) -> Iterator[None]:
    """What runs inside moves nothing of the run.

    Afterwards random generators, buffers and the mode of every module are what they were, bit for bit, as are what the task
    knows of its batch and the weight of the microbatch; `log` keeps nothing meanwhile. So are the attributes that user code
    gave the trainer and the modules: counters, lists, random generators, tensors of up to 16 MiB. What lies deeper, in
    objects of the user's own, is not known here. Parameters and their gradients are left to the caller
    (`torch.autograd.grad` touches neither).
    """
    plan, task, figures = trainer.plan, trainer.task, trainer.figures
    rng = rng_tensors(trainer.world.rank, trainer.device)
    fed, weight, watching = task.fed, plan.weight, figures.watching
    modes = [(module, module.training) for module in trainer.model.modules()]
    held = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module, _ in modes
        for name, buffer in module._buffers.items()
    ]
    of_torch = set(vars(torch.nn.Module()))
    give_back = [_held_attributes(module, of_torch) for module, _ in modes] + [_held_attributes(trainer, set())]
    figures.watching = False
    try:
        yield
    finally:
        for given_back in give_back:
            given_back()
        task.fed, plan.weight, figures.watching = fed, weight, watching
        for module, training in modes:
            module.training = training
        _give_buffers(held)
        set_rng(rng, trainer.world.rank, trainer.device)


def _give_buffers(held: list[tuple[Any, str, Any, Any]]) -> None:
    """The same tensors as before, with the values of before: also where a forward put another one in their place."""
    with torch.no_grad():
        for module, name, buffer, values in held:
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(values)


# Larger tensors among the attributes of a trainer or a module are data, and copies of them a cost.
LARGEST = 2**24


def _held_attributes(owner: Any, apart: set[str]) -> Callable[[], None]:
    """What gives an object its attributes back as they are now, but for those `apart`."""
    attributes = vars(owner)
    before = {name: value for name, value in attributes.items() if name not in apart}
    contents = [undo for value in before.values() if (undo := _held_content(value)) is not None]

    def give_back() -> None:
        for name in attributes.keys() - before.keys() - apart:
            del attributes[name]
        for name, value in before.items():
            if attributes.get(name, apart) is not value:
                attributes[name] = value
        for undo in contents:
            undo()

    return give_back


def _held_content(value: Any) -> Callable[[], object] | None:
    """What gives an object its content back that may change without the object being another."""
    if type(value) is torch.Tensor:
        if value.layout != torch.strided or value.nbytes > LARGEST or value.requires_grad:
            return None
        copy, version = value.detach().clone(), value._version
        return lambda: value.detach().copy_(copy) if value._version != version else None
    if type(value) in (list, dict, set):
        items = value.copy()
        return lambda: None if _is_same(value, items) else _refill(value, items)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        python_state = value.getstate()
        return lambda: value.setstate(python_state)
    if isinstance(value, np.random.Generator):
        bits, numpy_state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", numpy_state)
    return None


def _is_same(container: Any, items: Any) -> bool:
    """Whether a container holds the very same items."""
    if type(container) is set:
        return container == items
    pairs = zip(container, items, strict=False)
    values = zip(container.values(), items.values(), strict=False) if type(container) is dict else pairs
    keys_are_same = type(container) is list or list(container) == list(items)
    return len(container) == len(items) and keys_are_same and all(a is b for a, b in values)


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if type(container) is list else container.update)(items)


def training_forwards(trainer: Trainer, batches: int) -> Iterator[None]:
    """Run the model on up to so many training batches of this rank, one microbatch at each `next`, without gradients.

    The mode of each module is left to the caller, who sees the buffers as the forwards left them until the last one.
    """
    feed, plan, task = trainer.feed, trainer.plan, trainer.task
    with undisturbed(trainer):
        for batch in feed.again(task, plan, batches):
            for microbatch in plan.split(task, batch):
                if microbatch is None:
                    continue
                with torch.no_grad():
                    if task.inputs is None:
                        task.compute_loss(microbatch)
                    else:
                        task.model(*task.inputs(microbatch))
                yield
