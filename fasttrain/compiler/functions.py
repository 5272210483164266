"""Compile functions that are no forwards of modules."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from fasttrain.compiler.apply import check_backend, with_code
from fasttrain.lazy import torch

WITHOUT_CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def compile_function(
    function: FunctionType,
    *,
    name: str,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """torch.compile for a function of Python, with graphs of its own: those of other functions of the same code do not
    count towards its limit. `name`: in what torch tells of it.

    A mode with CUDA graphs is taken without them: what such a graph returns is overwritten by the next call.

    Raises:
        ConfigError: torch has no such backend.
    """
    check_backend(backend)
    settings: dict[str, Any] = {"backend": backend, "dynamic": dynamic}
    if mode is not None:
        settings["mode"] = WITHOUT_CUDA_GRAPHS.get(mode, mode)
    return torch.compile(with_code(function, function.__code__.replace(co_name=name)), **settings)


def compile_loss(
    loss: Callable[[Any, Any], Any],
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[[Any, Any], Any]:
    """A loss function `(output, batch) -> loss` as compiled code; training and evaluation have a graph each.

    Saves: passes over scores, as a softmax over a large vocabulary has several. Costs: compilation at the first steps.
    Sizes that change become symbols, and so do numbers of the batch that the loss looks at; what it looks at otherwise
    (texts) is compiled in, anew for each, up to torch's limit of eight. What the loss does not look at costs nothing.

    Raises:
        ConfigError: torch has no such backend.
    """

    def compiled_loss(output: Any, batch: Any) -> Any:
        return loss(output, batch)

    return compile_function(compiled_loss, name="loss", backend=backend, mode=mode, dynamic=dynamic)
