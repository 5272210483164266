"""Keep parts of a model as they are: parameters without gradients, norms with fixed statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    for child in module.children():
        child.train(mode)
    module.training = False
    return module


def hold_in_evaluation(module: nn.Module) -> None:
    """Let a module compute as in evaluation from now on, whatever `train()` is called on it or around it.

    What it holds obeys `train()` as before. In place; `copy.deepcopy` gives a copy that is held, too.
    """
    module.train = MethodType(_stay_in_evaluation, module)  # pyright: ignore[reportAttributeAccessIssue]
    module.training = False


def release(module: nn.Module, training: bool) -> None:
    """Let a held module obey `train()` again."""
    vars(module).pop("train", None)
    module.training = training


def is_held(module: nn.Module) -> bool:
    """Whether a module stays in evaluation."""
    return isinstance(held := vars(module).get("train"), MethodType) and held.__func__ is _stay_in_evaluation


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a module keeps statistics that move with each training forward: batch and instance norms, spectral norms."""
    held = module._buffers
    return held.get("running_mean") is not None or ("_u" in held and "_v" in held)


def norms_within(model: nn.Module, frozen: set[str]) -> list[tuple[str, nn.Module]]:
    """Modules with running statistics that belong to frozen weights: all that trains in them is frozen.

    `frozen`: names of parameters and buffers. A module without parameters of its own is asked for by its buffers, or,
    if it computes a weight of another module (as spectral norm), by those of that module.
    """
    found = []
    for name, module in model.named_modules():
        if not has_running_statistics(module):
            continue
        dot = f"{name}." if name else ""
        own = [f"{dot}{part}" for part, _ in module.named_parameters(recurse=False)]
        if all(part in frozen for part in own or [f"{dot}{part}" for part in module._buffers]):
            found.append((name, module))
    return found


def names_of_weights(model: nn.Module) -> list[str]:
    """Names of all parameters and buffers; of those with several names, the first."""
    return [name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part]


class FrozenWeights:
    """Weights of a model that are frozen, and the norms among them whose statistics are held.

    Saves: gradients and optimizer states of what is frozen, and its part of the backward pass where nothing before it
    trains. In place; names stay. `statistics`: running statistics move on all the same.
    """

    def __init__(self, model: nn.Module, is_frozen: Callable[[str], bool], statistics: bool = False) -> None:
        self.names = {name for name in names_of_weights(model) if is_frozen(name)}
        self.parameters = {name: p for name, p in model.named_parameters() if name in self.names}
        self.norms = [] if statistics else norms_within(model, self.names)
        self._versions: dict[str, int] = {}

    def freeze(self, only: Iterable[str] | None = None) -> None:
        """Take the gradients away, of all or of `only` some names, and hold the norms."""
        chosen = None if only is None else set(only)
        for name, parameter in self.parameters.items():
            if chosen is None or name in chosen:
                parameter.requires_grad_(False)
        for name, norm in self.norms:
            if chosen is None or self._within(name, norm, chosen):
                hold_in_evaluation(norm)

    def thaw(self, names: Iterable[str], training: bool) -> None:
        """Let `names` train from now on, and their norms take statistics."""
        chosen = set(names)
        for name, parameter in self.parameters.items():
            if name in chosen:
                parameter.requires_grad_(True)
        for name, norm in self.norms:
            if is_held(norm) and self._within(name, norm, chosen):
                release(norm, training)

    @staticmethod
    def _within(name: str, norm: nn.Module, chosen: set[str]) -> bool:
        dot = f"{name}." if name else ""
        own = [f"{dot}{part}" for part, _ in norm.named_parameters(recurse=False)]
        return any(part in chosen for part in own or [f"{dot}{part}" for part in norm._buffers])

    def started(self, model: nn.Module) -> None:
        """Note what the weights are now: as the model was built, or as a checkpoint gave them."""
        # Fused optimizers do not count a version up (torch 2.14.1), but what is frozen is in none of them.
        self._versions = {name: p._version for name, p in model.named_parameters() if name in self.names}

    def untouched(self, model: nn.Module) -> set[str]:
        """Names of what is frozen now and was not written since `started`: whoever builds the model has it."""
        found = {
            name
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and self._versions.get(name) == parameter._version
        }
        for name, norm in self.norms:
            if is_held(norm):
                found |= {f"{name}.{part}" if name else part for part in norm._buffers}
        return found
