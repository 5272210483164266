"""All state of a run, as tensors and plain values."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fasttrain.checkpoint import load_plain, load_tensors, save, stored_tensors
from fasttrain.data.seeds import mix
from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.lazy import np, torch
from fasttrain.nn.names import plain_name
from fasttrain.optim.chunks import is_packed
from fasttrain.trainer.extra_state import KEY, extra_states, give_extra_states
from fasttrain.trainer.left_out import changed, check_left_out, digests, left_out_names, set_trains, trains
from fasttrain.trainer.setup import seed_everything

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer


def model_tensors(model: Any) -> dict[str, Any]:
    """Weights and buffers by name, without the prefixes of wrappers; a parameter with two names stands once."""
    seen: dict[int, str] = {}
    tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] != KEY and id(value) not in seen:
            seen[id(value)] = name
            tensors[plain_name(name)] = value.detach()
    return tensors


def check_savable(trainer: Trainer) -> None:
    """Refuse, before a run begins, a model that no checkpoint could hold.

    Raises:
        CheckpointError: a module keeps an extra state that is neither a tensor nor JSON.
    """
    extra_states(trainer.model)


def _optimizer_kinds(trainer: Trainer) -> dict[str, str]:
    return {part: type(optimizer).__name__ for part, optimizer in trainer.optimizers.items()}


def _optimizer_states(trainer: Trainer) -> Iterator[tuple[str, Any, dict[str, Any], Any]]:
    """Each trained parameter of each optimizer: prefix, parameter, its group, its optimizer."""
    names = {id(parameter): plain_name(name) for name, parameter in trainer.model.named_parameters()}
    for part, optimizer in trainer.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield f"optimizer.{part}.{names[id(parameter)]}", parameter, group, optimizer


def _optimizer_tensors(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for prefix, parameter, _, optimizer in _optimizer_states(trainer):
        for key, value in optimizer.state[parameter].items():
            if is_packed(value):
                tensors |= {f"{prefix}.{key}:{part}": getattr(value, part) for part in value.__tensor_flatten__()[0]}
            else:
                (tensors if isinstance(value, torch.Tensor) else plain)[f"{prefix}.{key}"] = value
    return tensors, plain


def _restored_optimizer(
    trainer: Trainer, held: Mapping[str, Any], plain: Mapping[str, Any], skipped: set[str]
) -> dict[str, Any]:
    """Room in the optimizers for what a checkpoint holds of their states, by name; plain values are put there at once."""
    by_owner: dict[str, list[str]] = {}
    for name in [*held, *plain]:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    into: dict[str, Any] = {}
    for prefix, parameter, group, optimizer in _optimizer_states(trainer):
        names = [] if prefix.split(".", 2)[2] in skipped else by_owner.get(prefix, [])
        if names and hasattr(optimizer, "init_state"):  # states that are made of several tensors
            optimizer.init_state(parameter)
        state = optimizer.state[parameter]
        for name in names:
            key, _, part = name.rpartition(".")[2].partition(":")
            if part:
                into[name] = getattr(state[key], part)
            elif name in held:
                device = getattr(optimizer, "state_device", parameter.device)
                shape, dtype = held[name]
                into[name] = state[key] = _room(key, parameter, group, shape, dtype, device)
            else:
                state[key] = plain[name]
    return into


def rng_tensors(rank: int, device: Any) -> dict[str, Any]:
    """States of the random generators of this rank: torch's on host and device, numpy's and Python's."""
    numpy_state: Any = np.random.get_state()
    python_state = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(numpy_state[1]).astype("int64")),
        "numpy_position": torch.tensor([numpy_state[2], numpy_state[3]]),
        "numpy_gauss": torch.tensor([numpy_state[4]], dtype=torch.float64),
        "python": torch.tensor(python_state[1]),
        "python_gauss": torch.tensor([] if python_state[2] is None else [python_state[2]], dtype=torch.float64),
    }
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return {f"rng.{rank}.{name}": state for name, state in states.items()}


def set_rng(states: Mapping[str, Any], rank: int, device: Any) -> None:
    """Put the generators of this rank back."""
    own = {name.removeprefix(f"rng.{rank}."): state for name, state in states.items()}
    torch.set_rng_state(own["torch"])
    position, has_gauss = own["numpy_position"].tolist()
    keys = own["numpy"].numpy().astype("uint32")
    np.random.set_state(("MT19937", keys, position, has_gauss, float(own["numpy_gauss"])))
    random.setstate((3, tuple(own["python"].tolist()), next(iter(own["python_gauss"].tolist()), None)))
    if device.type in own:
        getattr(torch, device.type).set_rng_state(own[device.type])


def save_state(trainer: Trainer, path: Path, plain: Mapping[str, Any]) -> int:
    """Save everything a run is made of; every rank calls it. Returns the bytes written.

    In the middle of an evaluation too: the weights saved are those that train.
    """
    with trainer.plan.saving(trainer.model):
        return _save_state(trainer, path, plain)


def _save_state(trainer: Trainer, path: Path, plain: Mapping[str, Any]) -> int:
    optimizer_tensors, optimizer_plain = _optimizer_tensors(trainer)
    strategy_tensors, strategy_plain = _strategy_state(trainer)
    extra_tensors, extra_plain = extra_states(trainer.model)
    weights = model_tensors(trainer.model)
    left_out = left_out_names(weights, {plain_name(name) for name in trainer.plan.left_out(trainer.model)})
    tensors = {f"model.{name}": tensor for name, tensor in weights.items() if name not in left_out}
    tensors |= {f"extra.{name}": tensor for name, tensor in extra_tensors.items()}
    tensors |= optimizer_tensors | strategy_tensors | rng_tensors(trainer.world.rank, trainer.device)
    refused = {part: trainer.plan.refused(optimizer) for part, optimizer in trainer.optimizers.items()}
    return save(
        path,
        tensors,
        {
            "step": trainer.step,
            "data": trainer.feed.state_dict(),
            "refused": {part: float(steps) for part, steps in refused.items()},
            "counted_on_device": [part for part, steps in refused.items() if isinstance(steps, torch.Tensor)],
            "optimizer": optimizer_plain,
            "optimizers": _optimizer_kinds(trainer),
            "extra": extra_plain,
            "left_out": digests(trainer.model, {name: weights[name] for name in weights if name in left_out}),
            "trains": changed(trainer.built_trains, trains(trainer.model)),
            "strategies": strategy_plain,
            "world_size": trainer.world.size,
            "torch": torch.__version__,
            **plain,
        },
    )


def _strategy_state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    plain: dict[str, dict[str, Any]] = {}
    for slot, state in trainer.plan.state_dict().items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"strategy.{slot}.{key}"] = value
            else:
                plain.setdefault(slot, {})[key] = value
    return tensors, plain


def restore_state(trainer: Trainer, path: Path) -> dict[str, Any]:
    """Take up the state of a checkpoint; every rank calls it. Returns its plain part.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    plain, held = load_plain(path), stored_tensors(path)
    _check_same_optimizers(path, plain["optimizers"], _optimizer_kinds(trainer))
    weights, left_out = model_tensors(trainer.model), plain.get("left_out", {})
    check_left_out(path, trainer.model, weights, left_out)
    skipped = _misfits(path, weights, held, trainer.config.resume_skip)
    into = {f"model.{name}": tensor for name, tensor in weights.items() if name not in skipped and name not in left_out}
    if beyond := sorted(name for name in held if name.startswith("model.") and name[6:] not in weights):
        raise CheckpointError(
            f"the checkpoint {path} holds {len(beyond)} tensors of the model that this run has not (the first: "
            f"{beyond[0].removeprefix('model.')}); it is of another model, resume from one of this model."
        )
    into |= _restored_optimizer(trainer, held, plain["optimizer"], skipped)
    strategies = {n: torch.empty(s, dtype=d) for n, (s, d) in held.items() if n.startswith("strategy.")}
    rank = trainer.world.rank
    rng = {n: torch.empty(s, dtype=d) for n, (s, d) in held.items() if n.startswith(f"rng.{rank}.")}
    extra = {n: torch.empty(s, dtype=d) for n, (s, d) in held.items() if n.startswith("extra.")}
    load_tensors(path, into | strategies | rng | extra)
    _check_copies(path, trainer.model, weights, into)
    give_extra_states(trainer.model, {n.removeprefix("extra."): t for n, t in extra.items()}, plain["extra"])
    _give_strategies(trainer, strategies, plain["strategies"])
    set_trains(trainer.model, plain.get("trains", {}))
    trainer.step = plain["step"]
    trainer.feed.load_state_dict(plain["data"])
    for part, optimizer in trainer.optimizers.items():
        steps = int(plain["refused"].get(part, 0))
        if part in plain.get("counted_on_device", ()):
            # Rates are then tensors from the next step on, as they would have been; numbers are rounded otherwise.
            trainer.plan.set_refused(optimizer, torch.full((), float(steps), device=trainer.device))
        elif steps:
            trainer.plan.set_refused(optimizer, steps)
    trainer.plan.started_with(trainer.model, trainer.optimizers.values(), trainer.step)
    # For what was not saved: by fewer ranks, or on another kind of device.
    seed_everything(mix(trainer.seed, "resumed", trainer.step, rank))
    if rng:
        set_rng(rng, rank, trainer.device)
    return plain


def _check_copies(path: Path, model: Any, weights: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of which the model keeps a part elsewhere: 4-bit layers pack plain numbers into a new tensor.

    Raises:
        CheckpointError: such a part differs, and cannot be put in place.
    """
    for name, tensor in model_tensors(model).items():
        is_copy = tensor.numel() and tensor.data_ptr() != weights[name].data_ptr()
        if is_copy and f"model.{name}" in loaded and not torch.equal(tensor, loaded[f"model.{name}"]):
            raise CheckpointError(
                f"the checkpoint {path} has another '{name}' than this run, and only building the model sets it; build the "
                "model with the same weights (the same seed or the same pretrained file)."
            )


def _check_same_optimizers(path: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    if saved != here:
        theirs, ours = (", ".join(f"{part}={kind}" for part, kind in kinds.items()) for kinds in (saved, here))
        raise CheckpointError(
            f"the checkpoint {path} holds the state of {theirs}, this run has {ours}; a state means nothing to another "
            "optimizer: resume with the same optimizer, or start a new run."
        )


def _misfits(path: Path, weights: Mapping[str, Any], held: Mapping[str, Any], may_skip: Iterable[str]) -> set[str]:
    """Weights that have another shape in a checkpoint, and may be left out.

    Raises:
        CheckpointError: one may not.
    """
    shapes = {name: held[f"model.{name}"][0] for name in weights if f"model.{name}" in held}
    misfits = {name for name, shape in shapes.items() if shape != weights[name].shape}
    wrong = [name for name in weights if name in misfits and not any(fnmatchcase(name, p) for p in may_skip)]
    if wrong:
        told = [f"{name} has shape {tuple(shapes[name])} there and {tuple(weights[name].shape)} here" for name in wrong]
        patterns = ", ".join(dict.fromkeys(f"{name.rpartition('.')[0]}.*".removeprefix(".") for name in wrong))
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {', '.join(told[:6])}{', ...' if told[6:] else ''}; resume_skip=["
            f"{patterns}] leaves these weights as build_model makes them, and their state in the optimizer empty."
        )
    return misfits


def _room(key: str, parameter: Any, group: Mapping[str, Any], shape: Any, dtype: Any, device: Any) -> Any:
    """Room for a tensor of an optimizer's state, laid out and placed as the optimizer itself would."""
    if shape == parameter.shape and parameter.dim() > 0:
        return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    # torch counts steps on the host unless the kernel itself reads them.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device if not shape else device)


def _give_strategies(trainer: Trainer, tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    states: dict[str, dict[str, Any]] = {slot: dict(values) for slot, values in plain.items()}
    for name, tensor in tensors.items():
        _, slot, key = name.split(".", 2)
        states.setdefault(slot, {})[key] = tensor.to(trainer.device)
    trainer.plan.load_state_dict(states)


def refuse_wrong_length(trainer: Trainer, checkpoint: Path, config: str) -> None:
    """Refuse a checkpoint beyond the planned end, and epochs whose first part had other batches.

    A run is planned in steps. With another `batch_size` those of the first part are not those of the rest, and `epochs`
    would end it too early or too late without a word.

    Raises:
        ConfigError: the planned steps are not what is meant.
    """
    feed, settings, step = trainer.feed, trainer.config, trainer.step
    before = yaml.safe_load(config)["batch_size"]
    if before != settings.batch_size and settings.epochs is not None and feed.order is not None:
        position, per_epoch = feed.position, feed.order.steps_per_epoch
        this_epoch = math.ceil((feed.order.end - position.seen) / settings.batch_size)
        steps_left = max(0, this_epoch + (settings.epochs - position.epoch - 1) * per_epoch)
        raise ConfigError(
            f"epochs={settings.epochs} with batch_size={settings.batch_size}: {checkpoint} is at step {step} with batches "
            f"of {before}, and a run is planned in steps; say how many are meant: steps={step + steps_left} ends after the "
            f"same epochs, or go on with batch_size={before}."
        )
    if before != settings.batch_size and feed.data.lengths is not None and feed.position.seen:
        raise ConfigError(
            f"batch_size={settings.batch_size}: {checkpoint} stands in the middle of an epoch whose samples are grouped by "
            f"length into batches of {before}; others would come twice or not at all. Go on with batch_size={before}."
        )
    if feed.total_steps is not None and not feed.ends_with_epochs and step > feed.total_steps:
        raise ConfigError(
            f"{checkpoint} is at step {step}, beyond the {feed.total_steps} steps planned here; give more of them (steps=N, "
            "epochs=N), or start anew without resume."
        )
