"""The plan: each line of the training step, bound once from the strategies that act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fasttrain.core.batch import Microbatches
from fasttrain.core.slots import SLOTS, position
from fasttrain.core.strategy import (
    BESIDE,
    FOLD,
    NEST,
    NO_CONTEXT,
    ORDER,
    OWNER,
    VERBS,
    Context,
    Strategy,
    acts_on,
    conflicts,
)
from fasttrain.core.task import Task, weighted, weights_of
from fasttrain.errors import Conflict
from fasttrain.lazy import torch
from fasttrain.optim.guarded import obeys_found_inf, step_unless

# Verbs that the plan asks by itself, each in its own way.
UNBOUND = (
    *("dtypes", "around", "gradients", "update", "updated"),
    *("report", "remarks", "summary", "apart", "left_out", "state_dict"),
)


def _same(value: Any, *_: Any) -> Any:
    return value


def _nothing(*_: Any) -> None:
    return None


def _no_context(*_: Any) -> AbstractContextManager[None]:
    return NO_CONTEXT


class Nest:
    """Two or more contexts as one; entered in order, left in reverse, also when one of them fails."""

    __slots__ = ("contexts",)

    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for i, context in enumerate(self.contexts):
            try:
                context.__enter__()
            except BaseException as error:
                for entered in reversed(self.contexts[:i]):
                    entered.__exit__(type(error), error, error.__traceback__)
                raise

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


class _OwnMicrobatch:
    """A microbatch in the user's own step: `Plan.backward` inside it must not begin another."""

    __slots__ = ("context", "plan")

    def __init__(self, plan: Plan, context: AbstractContextManager[Any]) -> None:
        self.plan, self.context = plan, context

    def __enter__(self) -> None:
        self.context.__enter__()
        self.plan._in_own_microbatch = True

    def __exit__(self, *error: Any) -> None:
        self.plan._in_own_microbatch = False
        self.context.__exit__(*error)


def bind(kind: str, functions: list[Callable[..., Any]], default: Callable[..., Any]) -> Callable[..., Any]:
    """One callable for a verb: the default where nobody acts, the one bound method, or a closure over several."""
    if not functions:
        return default
    if len(functions) == 1:
        return functions[0]
    if kind == NEST:
        return lambda *args: Nest([function(*args) for function in functions])
    if kind == FOLD:

        def fold(value: Any, *args: Any) -> Any:
            for function in functions:
                value = function(value, *args)
            return value

        return fold

    def run(*args: Any) -> None:
        for function in functions:
            function(*args)

    return run


class Plan:
    """The lines of the step. Usable without a Trainer: `Plan([Bf16(), Norm(...)], context)`.

    Two strategies in one slot, or two owners of one line, are a `Conflict`.
    """

    def __init__(self, strategies: Iterable[Strategy], context: Context) -> None:
        self.strategies = {strategy.slot: strategy for strategy in sorted(strategies, key=lambda s: position(s.slot))}
        self.context = context
        for slot, clash in conflicts({slot: (type(s), s.config) for slot, s in self.strategies.items()}):
            other = self.strategies[clash.slot].name if clash.slot in self.strategies else "null"
            raise Conflict(
                f"{slot}={self.strategies[slot].name} cannot be used with {clash.slot}={other}: "
                f"{clash.why.rstrip('.')}; {clash.instead.rstrip('.')}."
            )
        for strategy in self.strategies.values():
            if strategy._context is None:
                strategy._context = context
            strategy.lines = self
        defaults: dict[str, Callable[..., Any]] = {
            "split": lambda task, batch: task.split(batch, 1),
            "forward_backward": self._forward_backward,
            "update": step_unless,
        }
        for verb, kind in VERBS.items():
            if verb in UNBOUND:
                continue
            default = defaults.get(verb) or {FOLD: _same, NEST: _no_context, ORDER: _nothing}[kind]
            name = "_microbatch" if verb == "microbatch" else verb
            setattr(self, name, bind(kind, self._acting(verb), default))
        self._acting("dtypes")  # asked before there is a plan, but two owners are a conflict all the same
        self._reduce = self._acting("gradients")
        self._update = (self._acting("update") or [step_unless])[0]
        self._updated = self._acting("updated")
        self._reporting = self._acting("report")
        self._unlike = self._acting("apart")
        self.speaks = bool(self._acting("remarks"))
        self.gradients_of: Callable[[Task, Any], Any] = self._gradients_of
        for wrap in reversed(self._acting("around")):  # the first slot ends up outermost
            self.gradients_of = wrap(self.gradients_of)
        self._refused: dict[int, Any] = {}
        self._empty = self._was_empty = self._in_own_microbatch = False
        self._whole = context.data_ranks == 1 and not self._acting("split") and not self._acting("forward_backward")
        self._bare = not any(self._acting(verb) for verb in ("microbatch", "forward", "scale"))
        self._together = any(strategy.forwards_together for strategy in self.strategies.values())
        # What the microbatch in work weighs; None: it is the whole step.
        self.weight: Any = None
        self.watch_norm = False
        self.watched_norm: Any = None

    # bound in __init__, named here for readers and type checkers
    model: Callable[[Any], Any]
    optimizer: Callable[[Any], Any]
    loss: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    split: Callable[[Task, Any], list[Any]]
    _microbatch: Callable[[bool], AbstractContextManager[Any]]
    forward: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[Any], Any]
    forward_backward: Callable[[Task, list[Any], Any], Any]
    started: Callable[[Any, Any, Any], None]
    evaluating: Callable[[Any], AbstractContextManager[Any]]
    saving: Callable[[Any], AbstractContextManager[Any]]
    logged: Callable[[dict[str, float]], None]
    evaluated: Callable[[dict[str, float]], None]
    ended: Callable[[], None]

    def _acting(self, verb: str) -> list[Callable[..., Any]]:
        acting = [s for s in self.strategies.values() if verb in acts_on(type(s), s.config)]
        if VERBS[verb] == OWNER and len(acting) > 1:
            first, second = acting[:2]
            raise Conflict(
                f"{first.slot}={first.name} and {second.slot}={second.name} both replace the line '{verb}' of the "
                f"step; turn one off: {first.slot}=null or {second.slot}=null."
            )
        return [getattr(strategy, verb) for strategy in acting]

    # ---- gradients of a step

    def _gradients_of(self, task: Task, batch: Any) -> Any:
        """Gradients of the whole batch in `.grad`; returns this rank's weighted loss (detached, on the device).

        The mean over data ranks of what is returned is the mean loss over everything counted in the step. `None` means
        that nothing counted at all: no gradients, and the step is refused.
        """
        if self._whole and task.count is None and type(batch) is not Microbatches:
            return self._one_forward_backward(task, batch)
        microbatches = self.split(task, batch)
        weights = weights_of(task, batch, microbatches, self.context)
        if weights == []:
            self._empty = True
            return None
        self.weight = None
        return self.forward_backward(task, microbatches, weights)

    def _one_forward_backward(self, task: Task, batch: Any) -> Any:
        """One microbatch on one rank: no weight, no sum."""
        self.weight = None
        if self._bare:
            loss = task.compute_loss(batch)
            loss = loss if type(loss) is torch.Tensor else weighted(loss, None)
            loss.backward()
            return loss.detach()
        with self._microbatch(True):
            with self.forward():
                loss = weighted(task.compute_loss(batch), None)
            self.scale(loss).backward()
        return loss.detach()

    def _forward_backward(self, task: Task, microbatches: list[Any], weights: list[Any] | None) -> Any:
        """The plain way: one microbatch after another."""
        total, last = None, len(microbatches) - 1
        for i, microbatch in enumerate(microbatches):
            with self._microbatch(i == last):
                if weights is not None:
                    self.weight = weights[i]
                    if self.weight is None:
                        if self._together:
                            self._keep_step(task, microbatch)
                        continue
                with self.forward():
                    loss = weighted(task.compute_loss(microbatch), self.weight)
                self.scale(loss).backward()
            loss = loss.detach()
            total = loss if total is None else total + loss
        return torch.zeros((), device=self.context.device) if total is None else total

    def _keep_step(self, task: Task, microbatch: Any) -> None:
        """Nothing counts here, but forwards of the other ranks wait for this one's: go along, and add nothing."""
        with self.forward():
            nothing = task.nothing(microbatch)
        nothing.backward()

    def microbatch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a microbatch of your own; gradients travel only on the last of a step.

        Inside, `plan.forward()` stands around the forward, and `plan.backward(loss)` does the backward.
        """
        if self._microbatch is _no_context:
            return NO_CONTEXT
        return _OwnMicrobatch(self, self._microbatch(is_last))

    def backward(self, loss: Any, is_last: bool = True) -> None:
        """One backward pass of your own. Outside of `microbatch`: `is_last=False` for all but the last of a step."""
        if self._in_own_microbatch:
            self.scale(loss).backward()
            return
        with self._microbatch(is_last):
            self.scale(loss).backward()

    # ---- update

    def gradients(self, model: Any, optimizer: Any) -> Any:
        """Everything done to gradients before the update; returns the verdict: a device flag, or `None`."""
        self._was_empty, self._empty = self._empty, False
        if self._was_empty:
            return True
        bad = None
        for act in self._reduce:
            flag = act(model, optimizer)
            if flag is not None:
                bad = flag if bad is None else torch.maximum(bad, flag)
        if self.watch_norm:
            self.watched_norm = gradient_norm(optimizer)
        return bad

    def update(self, optimizer: Any, bad: Any) -> None:
        """Step the optimizer; a refused step changes nothing and is counted apart."""
        if bad is True:
            self._refuse(optimizer, 1)
            return
        self._update(optimizer, bad)
        if bad is not None:
            self._refuse(optimizer, bad)

    def _refuse(self, optimizer: Any, by: Any) -> None:
        self._refused[id(optimizer)] = self._refused.get(id(optimizer), 0) + by

    def refused(self, optimizer: Any) -> Any:
        """Steps refused so far; a device tensor once a verdict was taken on the device."""
        return self._refused.get(id(optimizer), 0)

    def set_refused(self, optimizer: Any, steps: Any) -> None:
        """After a restore: how many steps had been refused; 0-dim on the device where the device counts them."""
        self._refused[id(optimizer)] = steps

    def updated(self, model: Any, optimizer: Any, step: int) -> None:
        """After `step` steps: schedules and averages follow the accepted ones."""
        if self._updated:
            accepted = self.accepted(optimizer, step)
            for act in self._updated:
                act(model, optimizer, accepted)

    def accepted(self, optimizer: Any, step: int) -> Any:
        """Steps that changed the weights: a number, or a device tensor if only the device knows."""
        refused = self._refused.get(id(optimizer))
        if refused is None:
            return step
        if isinstance(refused, torch.Tensor) and not obeys_found_inf(optimizer):
            return step - int(refused.item())
        return step - refused

    def started_with(self, model: Any, optimizers: Iterable[Any], step: int) -> None:
        """After initialisation or a restore at `step`: strategies set what the first step finds."""
        for optimizer in optimizers:
            self.started(model, optimizer, self.accepted(optimizer, step))

    # ---- what is seen and kept

    def notes(self) -> list[str]:
        """What strategies say of themselves at the head of a run."""
        return [f"{s.slot}={s.name}: {note}" for s in self.strategies.values() for note in s.notes()]

    def report(self) -> dict[str, Any]:
        """Figures of the strategies for the log; tensors are not read here."""
        figures: dict[str, Any] = {}
        for report in self._reporting:
            figures.update(report())
        if self._was_empty:  # nothing counted, so no gradient had a norm: this one is of a step before
            figures.pop("grad_norm", None)
        return figures

    def remarks(self) -> list[str]:
        """What strategies have to say of the run by now; each sentence once."""
        return [f"{s.slot}={s.name}: {remark}" for s in self.strategies.values() for remark in s.remarks()]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Figures of strategies for the whole run, by slot."""
        figures = {slot: dict(strategy.summary()) for slot, strategy in self.strategies.items()}
        return {slot: of_slot for slot, of_slot in figures.items() if of_slot}

    @property
    def apart(self) -> Callable[[], str | None] | None:
        """Asked after each step: why its time is counted apart, or `None`. `None` where no strategy ever says so."""
        if not self._unlike:
            return None
        return lambda: next((why for unlike in self._unlike if (why := unlike()) is not None), None)

    def left_out(self, model: Any) -> set[str]:
        """Names of weights that a checkpoint leaves out."""
        return set().union(*(names(model) for names in self._acting("left_out")))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of each strategy, by slot."""
        states = {slot: strategy.state_dict() for slot, strategy in self.strategies.items()}
        return {slot: state for slot, state in states.items() if state}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Give each strategy its state back; a slot without a saved state starts afresh."""
        for slot, state in states.items():
            if slot in self.strategies:
                self.strategies[slot].load_state_dict(state)

    def explain(self) -> list[tuple[str, list[str]]]:
        """Who acts on which line of the step, in order."""
        configs = {slot: strategy.config for slot, strategy in self.strategies.items()}
        return explain({slot: type(strategy) for slot, strategy in self.strategies.items()}, configs)


def gradient_norm(optimizer: Any) -> Any:
    """Euclidean norm of all gradients an optimizer will use; a 0-dim device tensor. `None`: there are none."""
    from fasttrain.optim.norms import total_norm

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return total_norm(parameters) if parameters else None


def explain(
    strategies: Mapping[str, type[Strategy]], configs: Mapping[str, Any] | None = None
) -> list[tuple[str, list[str]]]:
    """Who acts on which line of the step, in order; needs no torch. With `configs`, under these settings."""
    lines, configs = [], configs or {}
    verbs = {slot: acts_on(strategy, configs.get(slot)) for slot, strategy in strategies.items()}
    for verb in VERBS:
        if verb in BESIDE:
            continue
        acting = [f"{slot}={strategies[slot].name}" for slot in SLOTS if verb in verbs.get(slot, ())]
        lines.append((verb, acting))
    return lines
