"""Memory layouts of convolutional models: putting weights and batches into channels_last, and finding where it is lost."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from fasttrain.nn.recompute import StatisticsAside

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class LostLayout(NamedTuple):
    """A convolution that got an input which is not channels_last, and where the layout was lost."""

    module: str
    where: str


def is_channels_last(tensor: Tensor) -> bool:
    """Whether channels are innermost in memory. Of one channel, or one pixel, both layouts are the same."""
    return tensor.dim() in _FORMATS and tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])


def to_channels_last(tensor: Tensor) -> Tensor:
    """A tensor `[N, C, H, W]` or `[N, C, D, H, W]` with channels innermost in memory; a copy only where it is not so."""
    return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])


def spatial_dims(model: Any) -> set[int]:
    """The dims that inputs of convolutions have: 4 where there are 2-D ones, 5 for 3-D ones."""
    return {module.weight.dim() for module in model.modules() if _takes_images(module)}


def _takes_images(module: Any) -> bool:
    return isinstance(module, _ConvNd) and module.weight.dim() in _FORMATS


def channels_last(model: nn.Module) -> int:
    """Lay the weights of 2-D and 3-D convolutions out with channels innermost, in place; names and objects stay.

    Saves: the reordering that cuDNN's and oneDNN's fast kernels do around each convolution. Costs: nothing, where every
    layer keeps the layout; `lost_layouts` says which does not. Numbers are those of sums in another order.
    Returns the number of weights that are channels_last now.
    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    changed = 0
    for module in model.modules():
        if _takes_images(module):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() in _FORMATS:
                    if not is_channels_last(parameter):
                        parameter.data = to_channels_last(parameter.data)
                    changed += 1
    return changed


def _images(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim() in _FORMATS]


class LayoutWatch:
    """Looks at the inputs of convolutions through one or more forwards, and finds where channels_last was lost.

    Hooks on every module from the beginning until `end`. Code that torch.compile traces is not looked at, and its graphs
    stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        self._inside: list[str] = []
        # Why a tensor has another layout; by id, as tensors compare by value.
        self._lost: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self._last = ""
        self._found: dict[str, LostLayout] = {}
        self.seen: dict[str, bool] = {}
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enters))
            self._handles.append(module.register_forward_hook(self._leaves, always_call=True))

    def _enters(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._names[module]
        for given in _images(args):
            if not is_channels_last(given) and not self._cause(given):
                self._blame(given, self._code_before(name))
        if _takes_images(module) and args and isinstance(args[0], Tensor):
            self.seen[name] = is_channels_last(args[0])
            if not self.seen[name]:
                self._found.setdefault(name, LostLayout(name, self._cause(args[0])))
        self._inside.append(name)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._inside:
            return
        name = self._inside.pop()
        self._last = name or self._last
        for given in _images(output):
            if not is_channels_last(given) and not self._cause(given):
                handed_on = (self._cause(taken) for taken in _images(args) if not is_channels_last(taken))
                self._blame(given, next((cause for cause in handed_on if cause), name))

    def _cause(self, tensor: Tensor) -> str:
        cause, known = self._lost.get(id(tensor), ("", None))
        return cause if known is not None and known() is tensor else ""

    def _blame(self, tensor: Tensor, cause: str) -> None:
        self._lost[id(tensor)] = (cause, weakref.ref(tensor))

    def _code_before(self, name: str) -> str:
        if not self._last:
            return "the input of the model"
        inside = self._inside[-1] if self._inside else ""
        return f"the code of {inside or 'the model'} between {self._last} and {name}"

    def end(self) -> list[LostLayout]:
        """Take the hooks off; what was found, in the order of the forward."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._lost, self._inside = [], {}, []
        return list(self._found.values())


def lost_layouts(model: nn.Module, *args: Any, forward: Callable[..., Any] | None = None) -> list[LostLayout]:
    """Which convolutions get an input that is not channels_last in a forward, and the module that lost the layout.

    Runs `forward(*args)` (`None`: the model) once, eagerly and without gradients; random generators and running
    statistics are left as they were.
    """
    return _watched(model, forward or model, args)[0]


def _cards(model: nn.Module) -> list[torch.device]:
    """The CUDA devices whose generators a forward may draw from."""
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    return [device for device in devices if device.type == "cuda"]


def _watched(model: nn.Module, forward: Callable[..., Any], args: Any) -> tuple[list[LostLayout], dict[str, bool]]:
    watch = LayoutWatch(model)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(_cards(model)),
            StatisticsAside(model),
            torch.compiler.set_stance("force_eager"),
        ):
            forward(*args)
    finally:
        found = watch.end()
    return found, watch.seen


@functools.cache
def _look() -> Any:
    """An operation that tells of its input whether it is channels_last, as a bool tensor, and stays in a compiled graph."""

    # flexible_layout: the compiler hands over what it has, and does not restore the strides of eager code first.
    @torch.library.custom_op("fasttrain::is_channels_last", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def look(x: Tensor) -> Tensor:
        return torch.tensor(is_channels_last(x))

    @look.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty((), dtype=torch.bool)

    return look


def lost_when_compiled(model: nn.Module, *args: Any, backend: Any = "inductor") -> list[LostLayout]:
    """Which convolutions get channels_last in eager code and another layout in compiled code.

    Some operations lose it only as torch.compile takes them apart (pytorch/pytorch#197109). The strides are those that
    the compiled graph hands to each convolution. Costs a compilation, which is thrown away; without gradients.
    """
    _, eager = _watched(model, model, args)
    look, kept = _look(), {}

    def enters(module: nn.Module, args: Any, *, name: str) -> None:
        kept[name] = look(args[0])

    def run(*given: Any) -> dict[str, Tensor]:
        kept.clear()
        model(*given)
        return dict(kept)

    handles = [
        module.register_forward_pre_hook(functools.partial(enters, name=name))
        for name, module in model.named_modules()
        if _takes_images(module)
    ]
    torch.compiler.reset()
    try:
        with torch.no_grad(), torch.random.fork_rng(_cards(model)), StatisticsAside(model):
            compiled = {name: bool(flag) for name, flag in torch.compile(run, backend=backend)(*args).items()}
    finally:
        for handle in handles:
            handle.remove()
        torch.compiler.reset()
    names = list(compiled)
    before = dict(zip(names, ["the input", *names], strict=False))
    return [
        LostLayout(name, f"compiled code between {before[name]} and {name}")
        for name, is_kept in compiled.items()
        if eager.get(name) and not is_kept
    ]
