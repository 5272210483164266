"""Compile the step of an optimizer: the update of all its parameters, a refused one too, becomes one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fasttrain.compiler.functions import compile_function
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.optim.chunks import ChunkedStep, StepInBackward
from fasttrain.optim.guarded import loss_of

# Devices on which torch compiles only the formula whose counts of steps are on the device (`capturable`).
CAPTURABLE_ON = ("cuda", "xpu")


def compile_optimizer_step(
    optimizer: Any, *, backend: str | Callable[..., Any] = "inductor", mode: str | None = None, begun: bool = False
) -> CompiledStep:
    """Let `optimizer.step()` run as one compiled graph, in place; for any optimizer whose step torch can trace.

    Saves: launches and passes over memory, where an update is many small operations: lamb, adafactor, an optimizer of
    your own, AdamW without a fused kernel. Costs: compilation at the second step, longer with the number of parameters.
    Names, shapes and dtypes of states stay.

    torch's fused kernels, which are one launch already, give way to the plain formula, which can be traced. Rates may be
    numbers that change: the graph reads them from the device. A refused step (`found_inf`) changes nothing, and is
    decided on the device. The first step, which makes the states, is eager; of that one alone a refusal is read on the
    host. Once done, a second call only looks anew at what the optimizer holds, as one must after a restore.

    Args:
        begun: whether steps were taken before, in a run that goes on.

    Raises:
        ConfigError: the optimizer steps in chunks (`step_in_chunks`, `step_in_backward`), or compiles its step itself.
    Source: https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html
    """
    step = optimizer.step
    if isinstance(step, CompiledStep):
        step.look(begun)
        return step
    if isinstance(step, ChunkedStep | StepInBackward):
        where = "inside of the backward pass" if isinstance(step, StepInBackward) else "a few parameters at a time"
        raise ConfigError(
            f"compile.optimizer=true compiles the update of all parameters together, and this {type(optimizer).__name__} "
            f"steps {where}; use compile.optimizer=false, or an optimizer without in_backward, offload and state_dtype "
            "and without weights in 16 bits."
        )
    if getattr(optimizer, "compiles_itself", False):
        raise ConfigError(
            f"compile.optimizer=true: {type(optimizer).__name__} compiles its step by itself where that pays; use "
            "compile.optimizer=false."
        )
    compiled = CompiledStep(optimizer, backend, mode)
    compiled.look(begun)
    optimizer.step = compiled
    return compiled


class CompiledStep:
    """What stands in the place of `optimizer.step`; see `compile_optimizer_step`."""

    def __init__(self, optimizer: Any, backend: Any, mode: str | None) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            if "fused" in group:
                # Not False: with that torch takes neither its fused kernel nor lists of tensors (foreach), where they are
                # the default, and on a GPU the graph is a kernel a parameter.
                group["fused"] = None
            if "capturable" in group:
                group["capturable"] = group["capturable"] or _on(group, CAPTURABLE_ON)
        given = vars(optimizer).get("step")
        # Without decorators: those of torch stop a trace at both ends of the step, to set what is set here. A step that
        # someone put in the place of the class's is taken as it is.
        step = inspect.unwrap(type(optimizer).step) if given is None else lambda _: given()
        self._parts = getattr(optimizer, "parts", lambda: [(optimizer, step)])
        self._compiled = compile_function(_update, name="optimizer_step", backend=backend, mode=mode)
        # Hooks of the optimizer, and its name in profiles, are around the graph.
        self._hooked: Any = torch.optim.Optimizer.profile_hook_step(self._run)
        self._rates: list[Any] = []
        self._bad: Any = None
        self._met: set[int] = set()
        self._number = 0
        self._held: Any = None
        # Where a state is a plain number, the device cannot take it back, and the host has to know before the step.
        self.obeys_found_inf = True
        optimizer.register_load_state_dict_post_hook(lambda _: self.look(begun=True))

    def look(self, begun: bool) -> None:
        """Look at what the optimizer holds: states that a restore put there. `begun`: steps were taken before."""
        state, params = self.optimizer.state, self._parameters()
        is_stateless = not any(state.get(parameter) for parameter in params)
        self._number, self._held = len(params), None
        # Entries are made here: to look at a state, as saving does, makes one, and graphs are guarded by them.
        self._met = {id(p) for p in params if state[p] or (is_stateless and begun)}
        values = [value for parameter in params for value in state[parameter].values()]
        self.obeys_found_inf = all(value is None or isinstance(value, torch.Tensor) for value in values)

    def __call__(self, closure: Any = None) -> Any:
        """One step."""
        loss = loss_of(closure)
        given = vars(self.optimizer)
        # Kernels that are not fused refuse to see these.
        hidden = {key: given.pop(key) for key in ("found_inf", "grad_scale") if key in given}
        self._bad = hidden.get("found_inf")
        rates = self._present_rates()
        try:
            with torch.no_grad():
                self._hooked(self.optimizer)
        finally:
            self._bad = None
            given.update(hidden)
            for group, rate in rates:
                group["lr"] = rate
        return loss

    def _run(self, optimizer: Any) -> None:
        bad = self._bad
        if len(self._met) < self._number or self._number < sum(
            len(group["params"]) for group in optimizer.param_groups
        ):
            fresh = [p for p in self._parameters() if p.grad is not None and id(p) not in self._met]
            if fresh:
                self._first(fresh, bad)
                return
        if self._held is None:
            params = [p for p in self._parameters() if id(p) in self._met]
            self._held = params, [optimizer.state[p] for p in params]
        self._compiled(self._parts(), *self._held, bad)

    def _first(self, fresh: list[Any], bad: Any) -> None:
        """An eager step, which makes the states of parameters that have none."""
        if bad is not None and bad.item():
            return
        for part, step in self._parts():
            step(part)
        met = self._met | {id(parameter) for parameter in fresh}
        self.look(begun=False)
        self._met |= met

    def _present_rates(self) -> list[tuple[Any, Any]]:
        """Put rates that are numbers into tensors, or a graph would be made for each; returns what was there."""
        groups = self.optimizer.param_groups
        while len(self._rates) < len(groups):
            first = groups[len(self._rates)]["params"][0]
            # Not float64 by default: of such a tensor on the host torch takes the number, and compiles twice.
            dtype = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
            self._rates.append(torch.zeros((), dtype=dtype, device=first.device))
        stood = []
        for group, rate in zip(groups, self._rates, strict=True):
            lr = group["lr"]
            rate.copy_(lr) if isinstance(lr, torch.Tensor) else rate.fill_(lr)
            stood.append((group, lr))
            group["lr"] = rate
        return stood

    def _parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _on(group: dict[str, Any], devices: tuple[str, ...]) -> bool:
    return all(parameter.device.type in devices for parameter in group["params"])


def _update(parts: Any, params: list[Any], states: list[dict[str, Any]], bad: Any) -> None:
    """What is compiled: the step, and, where it was `bad`, back to the parameters and states that were there before."""
    # Looked at by this way first: found as the key of a state, a parameter is taken to have one gradient for ever, and the
    # graph is dropped with it. torch 2.14.1.
    for parameter in params:
        _ = parameter.grad
    if bad is None:
        for optimizer, step in parts:
            step(optimizer)
        return
    refused = bad.bool()
    weights = [parameter.clone() for parameter in params]
    before = [{key: (value, value.clone()) for key, value in state.items() if value is not None} for state in states]
    for optimizer, step in parts:
        step(optimizer)
    for parameter, old in zip(params, weights, strict=True):
        parameter.copy_(torch.where(refused, old, parameter))
    for state, kept in zip(states, before, strict=True):
        for key, (value, old) in kept.items():
            if state[key] is value:
                value.copy_(torch.where(refused, old, value))
            else:  # a step that puts a new tensor in the place of the old one
                state[key] = torch.where(refused, old, state[key])
