"""The constructor's phases: defaults that depend on the ranks, seeds, determinism, the plan."""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fasttrain.config import Resolved
from fasttrain.core.plan import Plan
from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import Context, Strategy, acts_on
from fasttrain.core.task import Task
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import np, torch
from fasttrain.nn.blocks import named_blocks
from fasttrain.registry import find

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer

# What is taken where a config is silent: an optimizer always, a way to spread the batch with several ranks.
DEFAULT_OPTIMIZER = "adamw"
DEFAULT_DATA_PARALLEL = "ddp"
# cuBLAS is deterministic with workspaces of fixed size alone, and reads this when it is first used.
CUBLAS_WORKSPACE, CUBLAS_FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


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
    resolved = settled(resolved, world)
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


def settled(resolved: Resolved, world: World) -> Resolved:
    """The config with each strategy that stands for another (`precision=auto`) replaced by it, and why.

    Raises:
        ConfigError: it means another one on another rank.
    """
    names, strategies, reasons = dict(resolved.names), dict(resolved.strategies), dict(resolved.reasons)
    for slot, cls in resolved.classes().items():
        if cls.stands_for.__func__ is Strategy.stands_for.__func__:
            continue
        meant = world.gather(cls.stands_for(world.device))
        if meant[0] is None:
            continue
        for rank, other in enumerate(meant):
            if other is None or other[0] != meant[0][0]:
                raise ConfigError(
                    f"{slot}={names[slot]} is {meant[0][0]} on rank 0 ({meant[0][1]}) and {other and other[0]} on rank "
                    f"{rank}; use the one that all ranks are to have: {slot}={meant[0][0]}."
                )
        name, why = meant[0]
        taken = find(slot, name).Config
        known = {field.name for field in dataclasses.fields(taken)}
        given = {field.name: getattr(strategies[slot], field.name) for field in dataclasses.fields(strategies[slot])}
        reasons[slot] = f"{names[slot]}: {why}"
        names[slot], strategies[slot] = name, taken(**{key: value for key, value in given.items() if key in known})
    return dataclasses.replace(resolved, names=names, strategies=strategies, reasons=reasons)


def waiting_together(resolved: Resolved) -> list[str]:
    """The strategies with which forwards of ranks wait for each other."""
    return [f"{slot}={resolved.names[slot]}" for slot, cls in resolved.classes().items() if cls.forwards_together]


def build_plan(resolved: Resolved, context: Context) -> Plan:
    """The plan of a config. The dtype policy is asked first: every other strategy may read it."""
    classes = resolved.classes()
    if "precision" in classes:
        policy = classes["precision"](resolved.strategies["precision"], context).dtypes()
        context = dataclasses.replace(context, dtypes=policy)
    return Plan([cls(resolved.strategies[slot], context) for slot, cls in classes.items()], context)


def check_model(model: Any, blocks: list[str] | None) -> None:
    """Refuse a lazy module, and names of blocks that it does not have.

    Raises:
        ConfigError: a parameter has no shape yet, which an optimizer, other ranks and checkpoints need; or a name is wrong.
    """
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"'{name}' has no shape yet (a lazy module); run one forward on a batch in build_model, or give its shape."
            )
    if blocks is not None:
        named_blocks(model, blocks)


def block_finder(hook: Callable[[Any], list[Any]], patterns: list[str] | None) -> Callable[[Any], list[Any]]:
    """What finds the blocks of a model: the names that the config gives, or else the trainer's `blocks(model)`."""
    return hook if patterns is None else partial(named_blocks, patterns=patterns)


def check_metrics(given: Any, base: Any) -> None:
    """Refuse metrics of an output that an evaluation will not have. `base`: the Trainer that `given` is a subclass of.

    Raises:
        ConfigError: there are metrics, and no loss to take an output.
    """
    told = {"metrics": "metrics(output, batch)", "build_metrics": "build_metrics"}
    own = [told[name] for name in told if getattr(given, name) is not getattr(base, name)]
    if own and given.evaluate is base.evaluate and given.loss is base.loss:
        raise ConfigError(
            f"{given.__name__} gives {own[0]}, but no loss(output, batch), so an evaluation has no output to measure; give "
            "loss (and inputs), or call self.log(name, value) in compute_loss."
        )


def check_loss(given: Any, base: Any, plan: Plan) -> None:
    """Refuse a strategy that changes the loss function where the user's code has none. `base`: the Trainer.

    Raises:
        ConfigError: the trainer makes its loss in compute_loss alone.
    """
    changing = [s for s in plan.strategies.values() if "loss" in acts_on(type(s), s.config)]
    if changing and given.loss is base.loss:
        slot, name = changing[0].slot, changing[0].name
        raise ConfigError(
            f"{slot}={name} is set to change loss(output, batch), and {given.__name__} has none of its own, only "
            f"compute_loss(batch); give inputs(batch) and loss(output, batch) instead, or set {slot}.loss=false."
        )


def build_optimizers(trainer: Trainer, base: Any) -> dict[str, Any]:
    """The optimizer of each part, by the plan or by the user's `build_optimizer`. `base`: the Trainer."""
    given = type(trainer)
    own = given.build_optimizer is not base.build_optimizer
    make = trainer.plan.optimizer(trainer.build_optimizer if own else None)
    optimizers = {name: make(part) for name, part in trainer.parts().items()}
    for optimizer in optimizers.values() if own else ():
        check_own_optimizer(optimizer, trainer.model, given.train_step is not base.train_step)
    return optimizers


def build_task(trainer: Trainer, base: Any) -> Task:
    """What the step needs to know of the user's code. `base`: the Trainer.

    A loss that a strategy changed becomes the trainer's own `loss`, so that whoever calls that (`compute_loss` of the
    user's or ours, an evaluation, a step of the user's) gets it.
    """
    given = type(trainer)
    check_metrics(given, base)
    if given.loss is not base.loss:
        changed = trainer.plan.loss(trainer.loss)
        if changed != trainer.loss:
            vars(trainer)["loss"] = changed
            # What is logged goes to a list outside; code that was made of the loss stops for it, at log points or not.
            vars(trainer)["log"] = torch.compiler.disable(trainer.log)
    apart = given.compute_loss is base.compute_loss
    return Task(
        model=trainer.model,
        compute_loss=trainer.compute_loss,
        count=None if given.count is base.count else trainer.count,
        inputs=trainer.inputs if apart else None,
        loss=trainer.loss if apart else None,
        cut=None if given.split is base.split else trainer.split,
        augment=None if given.augment is base.augment else trainer.augment,
        whole_batch_loss=trainer.whole_batch_loss,
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


# Flags of the process as they were before a run set them for itself.
_found: tuple[bool, bool, bool, bool, bool] | None = None


def set_determinism(deterministic: bool | str, debug: bool) -> None:
    """Deterministic kernels, or an error (`warn`: a warning) where there is none.

    `debug` names the forward line of a bad backward. What is false leaves flags as they are; `own_determinism` takes the
    rest back.
    """
    global _found
    own_determinism()
    if not deterministic and not debug:
        return
    _found = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    )
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, CUBLAS_FIXED)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    if debug:
        torch.autograd.set_detect_anomaly(True)


def own_determinism() -> None:
    """Take back what `set_determinism` set."""
    global _found
    if _found is None:
        return
    enabled, warns, benchmark, anomaly, check_nan = _found
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.backends.cudnn.benchmark = benchmark
    torch.autograd.set_detect_anomaly(anomaly, check_nan)
    _found = None


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
