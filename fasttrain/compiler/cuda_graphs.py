"""CUDA graphs of torch.compile (`mode="reduce-overhead"`) that stay right under accumulation and in evaluation.

torch keeps what its graphs compute in one pool of memory, and uses it again as soon as a new *generation* begins. Three
things go wrong in a training loop without help, and each has a function here:

- torch takes every call of a compiled function for a new generation, so that the second compiled block of a forward may
  overwrite the output of the first. Once generations are marked, marks alone begin them: one a microbatch, one an
  evaluation batch. pytorch/pytorch#152887, #160281.
- autograd takes the first gradient of a parameter as it comes, in the pool, and adds later ones to it; the next
  microbatch's replay writes over it, and the sum is wrong without a word. pytorch/pytorch#96693, #169545. Gradients are
  copied out of the pool before that. torch 2.14 does not do so itself: `cudagraph_trees_generation_cloning` is for outputs
  of forwards alone.
- outputs that somebody keeps (a loss, features) are written over as well. From torch 2.14 on the compiler copies those that
  are still held when a generation begins, if asked to; the loss of a step is copied here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from fasttrain.lazy import torch

# The modes of inductor that turn CUDA graphs on, the backend that consists of them, and the devices that have them.
MODES = ("reduce-overhead", "max-autotune")
BACKEND = "cudagraphs"
DEVICES = ("cuda",)


def makes_cuda_graphs(mode: str | None, backend: Any) -> bool:
    """Whether torch.compile with these settings replays CUDA graphs, where the device has them."""
    return backend == BACKEND or (backend == "inductor" and mode in MODES)


def keep_outputs() -> None:
    """Let the compiler copy outputs of forwards that somebody still holds when a generation begins, in this process.

    torch 2.14 and newer; older ones raise an error when such an output is looked at, or show the next batch's values: a
    clone must be kept there. pytorch/pytorch#188117.
    """
    triton = importlib.import_module("torch._inductor.config").triton
    if hasattr(triton, "cudagraph_trees_generation_cloning"):
        triton.cudagraph_trees_generation_cloning = "user_visible"


def mark_step_begin() -> None:
    """Begin a generation: what graphs computed before may be overwritten from now on."""
    torch.compiler.cudagraph_mark_step_begin()


class Generations:
    """Marks where generations begin: before the first forward after a backward, never between two forwards of one.

    `forward()` is entered around each forward of a microbatch, `microbatch()` around its forward and backward (or around
    the backward alone). Two forwards before one backward are one generation, so that the activations of the first stay.
    Within `evaluating()` one begins with each `delivered()` batch.
    """

    def __init__(self, gradients: Gradients | None = None, mark: Callable[[], object] | None = None) -> None:
        self.gradients = gradients
        self._mark = mark_step_begin if mark is None else mark
        self._pending = self._evaluates = False
        self._evaluating = _Evaluating(self)
        self._forward, self._last, self._not_last = _Forward(self), _Microbatch(self, True), _Microbatch(self, False)

    def forward(self) -> _Forward:
        """Around a forward."""
        return self._forward

    def microbatch(self, is_last: bool) -> _Microbatch:
        """Around forward and backward. `is_last=False`: more gradients of this step follow, and these are kept for them."""
        return self._last if is_last else self._not_last

    def evaluating(self) -> _Evaluating:
        """Around an evaluation, whose forwards have no `forward()` around them."""
        return self._evaluating

    def delivered(self) -> None:
        """A batch is there, and is about to be computed on."""
        if self._evaluates:
            self._mark()


class _Forward:
    __slots__ = ("of",)

    def __init__(self, of: Generations) -> None:
        self.of = of

    def __enter__(self) -> None:
        if not self.of._pending:
            self.of._pending = True
            self.of._mark()

    def __exit__(self, *error: object) -> None:
        pass


class _Evaluating:
    __slots__ = ("of",)

    def __init__(self, of: Generations) -> None:
        self.of = of

    def __enter__(self) -> None:
        self.of._evaluates, self.of._pending = True, False
        self.of._mark()

    def __exit__(self, *error: object) -> None:
        self.of._evaluates = False


class _Microbatch:
    __slots__ = ("is_last", "of")

    def __init__(self, of: Generations, is_last: bool) -> None:
        self.of, self.is_last = of, is_last

    def __enter__(self) -> None:
        if self.is_last and self.of.gradients is not None:
            self.of.gradients.forget()

    def __exit__(self, kind: Any, *error: object) -> None:
        self.of._pending = False
        if not self.is_last and kind is None and self.of.gradients is not None:
            self.of.gradients.keep()


class Gradients:
    """Gradients of parameters, copied out of the memory of CUDA graphs once a step each.

    `keep()` is called after each microbatch but the last of a step, `forget()` before the last. What was copied once is
    added to in place by autograd, and stays where it is.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self._own: dict[int, Any] = {}

    def keep(self) -> int:
        """Give each parameter whose gradient is not ours yet a copy of it. Returns how many were copied."""
        own = self._own
        fresh = [
            parameter
            for parameter in self._parameters
            if (gradient := parameter.grad) is not None and own.get(id(parameter)) is not gradient
        ]
        # Sparse gradients are not made by graphs.
        fresh = [parameter for parameter in fresh if parameter.grad.layout == torch.strided]
        if not fresh:
            return 0
        with torch.no_grad():
            gradients = [parameter.grad for parameter in fresh]
            copies = [torch.empty_like(gradient) for gradient in gradients]
            torch._foreach_copy_(copies, gradients)
            for parameter, copy in zip(fresh, copies, strict=True):
                parameter.grad = own[id(parameter)] = copy
        return len(fresh)

    def forget(self) -> None:
        """Hold none of them any longer: whoever uses up gradients frees them."""
        self._own.clear()
