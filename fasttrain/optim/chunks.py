"""Step an optimizer a few parameters at a time. What is wide, or on the device, is so only for the chunk in work.

torch's optimizers look at their groups and at nothing else, so a step can be done in parts: groups with some of the
parameters are presented, the optimizer steps, the next ones are presented. Four things follow from that one idea:

- weights in bfloat16: a chunk is taken to float32, stepped, and rounded back stochastically;
- moments in bfloat16, beside weights in any dtype: the same for the states;
- states on the host: a chunk's states come to the device, and go back;
- steps in the backward pass: a parameter is stepped, and its gradient freed, when the gradient is there.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from fasttrain.errors import SyncError
from fasttrain.lazy import torch
from fasttrain.optim.rounding import round_stochastically

# Elements in work at a time: 64 MiB each of weights, gradients and each state in float32.
CHUNK = 2**24
Chunk = list[tuple[int, list[Any]]]


def is_packed(value: Any) -> bool:
    """Whether a tensor is made of others (a quantized state): such a one is neither cast nor moved."""
    return hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local")


def _is_moment(key: str, value: Any, parameter: Any) -> bool:
    """A state that grows with its parameter, not a count of steps. Those of a single number are single numbers, too."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or is_packed(value):
        return False
    return value.dim() > 0 or (parameter.dim() == 0 and key != "step")


def _rounded(value: Any, dtype: Any, generator: Any) -> Any:
    if value.dtype in (torch.float32, torch.float64) and dtype == torch.bfloat16:
        return round_stochastically(value.float(), generator)
    return value.to(dtype)


class ChunkedStep:
    """What stands in the place of `optimizer.step`; see `step_in_chunks`."""

    def __init__(self, optimizer: Any, *, narrow: bool, state_dtype: Any, offload: bool, generator: Any, chunk: int):
        self.optimizer, self.narrow, self.state_dtype, self.offload = optimizer, narrow, state_dtype, offload
        self.generator, self.chunk = generator, chunk
        self._layout: tuple[int, ...] = ()
        self._chunks: list[Chunk] = []
        # Then parameters and states are the optimizer's own, and need no care.
        self._plain = not narrow and state_dtype is None and not offload
        if offload:
            optimizer.state_device = torch.device("cpu")  # where a restored state is put
        if not self._plain:
            with torch.no_grad():
                for parameter in list(optimizer.state):
                    self._put_away(parameter, {}, optimizer.state[parameter])

    def __call__(self, closure: Any = None) -> Any:
        """Step everything that has a gradient."""
        loss = None if closure is None else closure()
        for chunk in self.chunks():
            self.step_chunk(chunk)
        return loss

    def chunks(self) -> list[Chunk]:
        """The parameters in chunks, each of parts (number of the group, parameters). Made anew when groups have grown."""
        groups = self.optimizer.param_groups
        layout = tuple([len(group["params"]) for group in groups])
        if layout != self._layout:
            self._layout, self._chunks, filled = layout, [], self.chunk
            for number, group in enumerate(groups):
                for parameter in group["params"]:
                    filled += parameter.numel()
                    if filled > self.chunk:
                        self._chunks.append([])
                        filled = parameter.numel()
                    chunk = self._chunks[-1]
                    if not chunk or chunk[-1][0] != number:
                        chunk.append((number, []))
                    chunk[-1][1].append(parameter)
        return self._chunks

    def step_chunk(self, chunk: Chunk) -> None:
        """Step the parameters of a chunk that have a gradient."""
        with torch.no_grad():
            self._step_chunk(chunk)

    def _step_chunk(self, chunk: Chunk) -> None:
        optimizer = self.optimizer
        groups, presented = optimizer.param_groups, []
        stood: list[tuple[Any, Any, dict[str, Any]]] = []
        for number, params in chunk:
            ready = [parameter for parameter in params if parameter.grad is not None]
            if ready:
                stand_ins = ready if self._plain else [self._bring(parameter, stood) for parameter in ready]
                presented.append({**groups[number], "params": stand_ins})
        if not presented:
            return
        optimizer.param_groups = presented
        try:
            type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
            for parameter, stand_in, held in stood:
                if stand_in is not parameter:
                    parameter.copy_(_rounded(stand_in, parameter.dtype, self.generator))
                self._put_away(parameter, held, optimizer.state.pop(stand_in, {}))

    def _bring(self, parameter: Any, stood: list[tuple[Any, Any, dict[str, Any]]]) -> Any:
        """What the optimizer steps: the parameter, or a float32 copy with its gradient; and states as it wants them."""
        stand_in = parameter
        # float64 and complex weights beside narrow ones keep every digit.
        if self.narrow and parameter.is_floating_point() and parameter.dtype.itemsize == 2:
            stand_in = parameter.detach().float()
            stand_in.grad = parameter.grad.float()
        state = self.optimizer.state
        held = state.pop(parameter, {})
        if held:
            state[stand_in] = {key: self._widened(key, value, parameter) for key, value in held.items()}
        stood.append((parameter, stand_in, held))
        return stand_in

    def _widened(self, key: str, value: Any, parameter: Any) -> Any:
        if not _is_moment(key, value, parameter):
            return value
        if self.offload:
            value = value.to(parameter.device, non_blocking=True)
        if not self.narrow and self.state_dtype is None:
            return value
        return value.to(torch.float64 if parameter.dtype == torch.float64 else torch.float32)

    def _put_away(self, parameter: Any, held: dict[str, Any], new: dict[str, Any]) -> None:
        """Keep the states of a parameter until its next step, on the host in the memory that held them before."""
        kept = {}
        # By name: a checkpoint of several ranks gives states back in another order, and each takes the next random numbers.
        for key, value in sorted(new.items()):
            if _is_moment(key, value, parameter):
                # Of bfloat16 weights, moments are bfloat16, too, if nothing else is asked for.
                dtype = self.state_dtype or (parameter.dtype if self.narrow else value.dtype)
                value = _rounded(value, dtype, self.generator)
                if self.offload:
                    value = _to_host(value, held.get(key))
            kept[key] = value
        if kept:
            self.optimizer.state[parameter] = kept


def _to_host(value: Any, room: Any) -> Any:
    """A copy on the host, pinned, which the device fills in its own time; in `room` where that fits."""
    if value.device.type == "cpu":
        return value
    if room is None or room.dtype != value.dtype or room.shape != value.shape or not room.is_pinned():
        room = torch.empty_like(value, device="cpu", pin_memory=True)
    return room.copy_(value, non_blocking=True)


class _Synchronised:
    """Around forward and backward of a microbatch; one object, entered again and again."""

    __slots__ = ("owner",)

    def __init__(self, owner: StepInBackward) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        self.owner.armed = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.owner.armed = False
        if kind is None:
            self.owner.finish()


class StepInBackward:
    """Steps each parameter when its gradient is complete, inside the backward pass, and frees the gradient.

    Gradients are complete in the last backward pass of a step, which stands inside of `last()`; those of earlier passes
    are kept until then. `optimizer.step()` steps what is left over, and ends the round.
    """

    def __init__(self, step: ChunkedStep) -> None:
        self.step = step
        self.armed = False
        self._stepped: set[int] = set()
        # Parameters on the host and on a device are finished by two threads of autograd.
        self._lock = threading.Lock()
        self._last = _Synchronised(self)
        self.handles = []
        for number, group in enumerate(step.optimizer.param_groups):
            names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                arrive = functools.partial(self._arrive, [(number, [parameter])], name)
                self.handles.append(parameter.register_post_accumulate_grad_hook(arrive))
        step.optimizer.step = self

    def __call__(self, closure: Any = None) -> Any:
        """Step what is left over, and end the round."""
        loss = self.step(closure)
        self._stepped.clear()
        return loss

    def finish(self) -> None:
        """Step and free what got its gradient in an earlier microbatch, and none in the last."""
        self.step()
        self.step.optimizer.zero_grad(set_to_none=True)

    def last(self) -> _Synchronised:
        """Around forward and backward of the last microbatch of a step."""
        return self._last

    def _arrive(self, chunk: Chunk, name: str, parameter: Any) -> None:
        if not self.armed:
            return
        with self._lock:
            if id(parameter) in self._stepped:
                raise SyncError(
                    f"two backward passes of one step reached '{name}', and in_backward=true had stepped it after the "
                    "first; write plan.backward(loss, is_last=False) for all but the last, or set "
                    "optimizer.in_backward=false."
                )
            self._stepped.add(id(parameter))
            self.step.step_chunk(chunk)
            parameter.grad = None


def step_in_chunks(
    optimizer: Any,
    *,
    narrow: bool = False,
    state_dtype: Any = None,
    offload: bool = False,
    generator: Any = None,
    chunk: int = CHUNK,
) -> ChunkedStep:
    """Let `optimizer.step()` go through its parameters chunk by chunk, in place; for any optimizer of torch's kind.

    Args:
        narrow: parameters in bfloat16 are stepped in float32 and rounded back stochastically; so are their moments.
        state_dtype: of the moments between steps (`None`: that of the parameters); stepped in float32.
        offload: moments are on the host between steps (pinned), and the update is computed on the device.
        generator: of the rounding, on the device; the same on every rank, or replicas drift apart.
        chunk: elements in work at a time.

    Saves: 2 bytes a parameter each of weights and moments, or all of the moments. Costs: float32 copies of a chunk.
    With `offload`, the device fills host memory in its own time: synchronise with it before reading that.
    """
    step = ChunkedStep(
        optimizer, narrow=narrow, state_dtype=state_dtype, offload=offload, generator=generator, chunk=chunk
    )
    optimizer.step = step
    return step


def step_in_backward(optimizer: Any, step: ChunkedStep | None = None) -> StepInBackward:
    """Step each parameter as soon as its gradient is complete, and free the gradient, in place.

        stepping = step_in_backward(optimizer)
        with stepping.last():
            loss_of(model, batch).backward()
        optimizer.step()

    Saves: all gradients but those of one layer. Costs: one call of the optimizer a parameter, small kernels.
    Needs: nothing that looks at all gradients before the update: clipping, loss scaling, refused steps.
    Source: Lv et al. 2023, arXiv:2306.09782 (LOMO).
    """
    return StepInBackward(step_in_chunks(optimizer) if step is None else step)
