"""The constructor's phases: defaults that depend on the ranks, seeds, determinism, the plan."""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fasttrain.config import Resolved
from fasttrain.core.plan import Plan
from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import Context
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import np, torch
from fasttrain.registry import find

# What is taken where a config is silent: an optimizer always, a way to spread the batch with several ranks.
DEFAULT_OPTIMIZER = "adamw"
DEFAULT_DATA_PARALLEL = "ddp"


def config_class(given: type) -> type:
    """A `class Config(Trainer.Config)` as a frozen keyword-only dataclass, decorated or not."""
    if "__dataclass_fields__" in vars(given):
        return given
    return dataclasses.dataclass(frozen=True, kw_only=True)(given)


def completed(resolved: Resolved, world: World, own_optimizer: bool) -> Resolved:
    """The config with the defaults that depend on ranks and code.

    Raises:
        ConfigError: several ranks, and the way to spread the batch is turned off; or two optimizers.
    """
    added = {}
    if "optimizer" in resolved.names:
        if own_optimizer:
            raise ConfigError(
                f"optimizer={resolved.names['optimizer']} is set, but the trainer overrides build_optimizer; drop one."
            )
    elif not own_optimizer:
        added["optimizer"] = DEFAULT_OPTIMIZER
    if world.size > 1 and "data_parallel" not in resolved.names:
        if "data_parallel" in resolved.off:
            raise ConfigError(
                f"data_parallel=null with {world.size} ranks: each would train a model of its own; leave it out (ddp), "
                "name a strategy, or start one process."
            )
        added["data_parallel"] = DEFAULT_DATA_PARALLEL
    if not added:
        return resolved
    names = {**resolved.names, **added}
    strategies = {**resolved.strategies, **{slot: find(slot, name).Config() for slot, name in added.items()}}
    in_order = [slot for slot in SLOTS if slot in names]
    return dataclasses.replace(
        resolved,
        names={slot: names[slot] for slot in in_order},
        strategies={slot: strategies[slot] for slot in in_order},
        off=resolved.off - set(added),
    )


def build_plan(resolved: Resolved, context: Context) -> Plan:
    """The plan of a config. The dtype policy is asked first: every other strategy may read it."""
    classes = resolved.classes()
    if "precision" in classes:
        policy = classes["precision"](resolved.strategies["precision"], context).dtypes()
        context = dataclasses.replace(context, dtypes=policy)
    return Plan([cls(resolved.strategies[slot], context) for slot, cls in classes.items()], context)


def check_shapes(model: Any) -> None:
    """Refuse a lazy module: an optimizer, other ranks and checkpoints need the shapes of weights.

    Raises:
        ConfigError: a parameter has no shape yet.
    """
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"'{name}' has no shape yet (a lazy module); run one forward on a batch in build_model, or give its shape."
            )


def check_own_optimizer(optimizer: Any, model: Any, own_step: bool) -> None:
    """Refuse an optimizer of the user's that the step, the ranks or a checkpoint cannot handle.

    Raises:
        ConfigError: it trains what is no parameter of the model, or steps by a closure.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in known:
            raise ConfigError(
                f"build_optimizer trains a tensor of shape {tuple(parameter.shape)} that is no parameter of the model: "
                "ranks would not average its gradient, and checkpoints would not hold it; register it in the model "
                "(model.name = nn.Parameter(...) in build_model)."
            )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty and not own_step:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, and a step here does so once; "
            "override train_step, or use another optimizer."
        )


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def set_determinism(deterministic: bool, debug: bool) -> None:
    """Deterministic kernels or an error where there is none; `debug` names the forward line of a bad backward."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)
    torch.autograd.set_detect_anomaly(debug)


@contextmanager
def only_trains(model: Any, part: Any) -> Iterator[None]:
    """While entered, the parameters of `part` alone require gradients."""
    kept = {id(parameter) for parameter in part.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
