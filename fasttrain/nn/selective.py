"""Checkpointing that keeps what is dear to compute again: which results, and how they are kept and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from fasttrain.errors import ConfigError, did_you_mean

# What an accelerator computes while it moves a byte: an A100 156 FLOPs, an H100 295 (both bf16). What stays below waits
# for memory all the same, and is as cheap to compute again as an activation or a norm.
FLOPS_PER_BYTE = 200.0

# `(operation, args, kwargs, result) -> bool`: whether the result is kept.
Keeps = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], bool]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

PRESETS: dict[str, tuple[str, ...]] = {
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    "convolutions": (
        "convolution",
        "_convolution",
        "cudnn_convolution",
        "mkldnn_convolution",
        "convolution_overrideable",
    ),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
}
# torch counts no FLOPs for these, and they are matrix products throughout.
_RECURRENT = ("_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "miopen_rnn")


# ---- which results


@dataclass(frozen=True)
class ByCost:
    """See `keep_by_cost`."""

    flops_per_byte: float

    def __call__(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether the result is kept."""
        flops = flops_of(operation, args, kwargs, result)
        if flops is None:
            return True
        size = sum(_hint(t.numel()) * t.element_size() for t in _tensors(result))
        return flops > self.flops_per_byte * size


@dataclass(frozen=True)
class ByName:
    """See `keep_operations`."""

    names: tuple[str, ...]
    operations: frozenset[Any] = field(repr=False)

    def __call__(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether the result is kept."""
        return operation in self.operations or getattr(operation, "overloadpacket", None) in self.operations


def keep_by_cost(flops_per_byte: float = FLOPS_PER_BYTE) -> Keeps:
    """Keep results that took more than so many FLOPs for each of their bytes.

    Norms, activations, dropout and sums cost no FLOPs worth the name and are computed again; so are products that make
    many bytes of few, such as the convolution that widens a bottleneck. Operations that torch knows nothing of (own
    kernels, collectives) are kept.
    """
    return ByCost(float(flops_per_byte))


def keep_operations(names: Iterable[str]) -> Keeps:
    """Keep the results of some operations: presets (`matmuls`, `convolutions`, `attention`) or names (`aten.mm`).

    A name without overload means all of them.

    Raises:
        ConfigError: there is no such operation, or its result is a view or made in place.
    """
    names = tuple(names)
    chosen = [operation for name in names for operation in (_preset(name) or [find_operation(name)])]
    return ByName(names, frozenset(chosen))


def find_operation(name: str) -> Any:
    """The operation of a name such as `aten.mm` or `aten.convolution.default`.

    Raises:
        ConfigError: there is none, or its result is a view or made in place.
    """
    namespace, _, rest = name.removeprefix("torch.ops.").partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if namespace and base else None
    if packet is None:
        known = [known.replace("::", ".", 1) for known in torch._C._dispatch_get_all_op_names() if "." not in known]
        raise ConfigError(f"there is no operation '{name}'; {did_you_mean(name, [*PRESETS, *known])}")
    if overload and overload not in packet.overloads():
        known = [f"{namespace}.{base}.{known}" for known in packet.overloads()]
        raise ConfigError(f"there is no operation '{name}'; {did_you_mean(name, known)}")
    first = getattr(packet, overload or packet.overloads()[0])
    if not _has_result_of_its_own(first) or base in ("_to_copy", "detach"):
        raise ConfigError(
            f"the result of '{name}' is a view, made in place, or a mere cast: it cannot be kept; name the operation that "
            "computes what it shows."
        )
    return first if overload else packet


def _preset(name: str) -> list[Any]:
    return [packet for base in PRESETS.get(name, ()) if (packet := getattr(torch.ops.aten, base, None)) is not None]


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """FLOPs of one call as torch.utils.flop_counter has them; 0 where only memory is moved, `None` where unknown."""
    packet = getattr(operation, "overloadpacket", operation)
    formula = flop_registry.get(packet)
    if formula is not None:
        return _hint(formula(*args, **kwargs, out_val=result))
    if getattr(operation, "namespace", "") not in ("aten", "prims"):
        return None
    if packet.__name__.startswith("_scaled_dot_product"):
        return _hint(sdpa_flop_count(*(t.shape for t in args[:3])))
    return None if packet.__name__ in _RECURRENT else 0


def _hint(size: Any) -> int:
    """The size that a symbol had when it was traced: what is kept must not depend on the batch that comes later."""
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def _has_result_of_its_own(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return True
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


# ---- keeping them


def selective_contexts(keeps: Keeps) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpoint's forward and of its second forward, as `torch.utils.checkpoint` takes them.

    To be called where the checkpoint is: saved-tensor hooks that are active there act on what is kept, too.

    torch's own pair (`create_selective_checkpoint_contexts`) does the same, but where a convolution's result is changed in
    place by the activation after it, it fails; where a kept operation draws random numbers, those drawn after it are
    others the second time, without a word; and it keeps results that nothing needs, such as that of a block's last
    product. torch 2.14.1.
    """
    kept: dict[tuple[Any, int], _Call] = {}
    return _Keeping(keeps, kept, _hooks()), _Replaying(kept)


def traced_contexts(keeps: Keeps) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """The same for code that torch.compile traces, where its partitioner keeps what it is told to.

    A checkpoint that dynamo could not trace in one piece is run as it is, with `selective_contexts`.
    """
    contexts = partial(_traced_or_not, keeps)
    if isinstance(keeps, ByCost | ByName):
        contexts.__dict__["cache_hash"] = repr(keeps)  # torch then takes graphs from its cache on disk
    return contexts


def _traced_or_not(keeps: Keeps) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if TracingContext.try_get() is None:
        return selective_contexts(keeps)
    return create_selective_checkpoint_contexts(partial(_policy, keeps))


def _policy(keeps: Keeps, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not _has_result_of_its_own(operation):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if hasattr(context, "op_output"):
        result = context.op_output
    else:  # torch 2.11; what is traced is fake, so this computes nothing, and it leaves no trace
        with disable_proxy_modes_tracing():
            result = operation(*args, **kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps(operation, args, kwargs, result) else CheckpointPolicy.PREFER_RECOMPUTE


class _Held:
    """One tensor beside the graph. With hooks: what they made of it."""

    __slots__ = ("hooks", "value", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.value: Any = _apart(tensor)
        self.version = tensor._version
        self.hooks: Hooks | None = None

    def pack(self, hooks: Hooks) -> None:
        """Hold what the hooks make of the tensor instead."""
        self.value, self.hooks = hooks[0](self.value), hooks

    def tensor(self) -> Tensor:
        """The tensor as it was."""
        if self.hooks is not None:
            return self.hooks[1](self.value)
        if self.value._version != self.version:
            raise RuntimeError(
                "a result that checkpointing keeps for backward was changed in place after its block was done; "
                "change a clone of it instead."
            )
        return self.value

    def copied(self) -> _Held:
        """The same apart from its storage, which is about to be changed."""
        return _Held(self.tensor().clone())


class _Call:
    """The result of one call: a tree of held tensors. `random`: states of the generators after it, where it draws."""

    __slots__ = ("changed", "random", "result")

    def __init__(self, operation: Any, result: Any) -> None:
        self.result = tree_map(lambda value: _Held(value) if isinstance(value, Tensor) else value, result)
        self.changed = False
        draws = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
        self.random = _random_states(result) if draws else {}

    def pack(self, hooks: Hooks) -> None:
        """Let the hooks act on what is held, but not on copies."""
        if not self.changed:
            for held in tree_leaves(self.result):
                if isinstance(held, _Held):
                    held.pack(hooks)

    def spare(self) -> None:
        """Copy what is held before it is changed in place."""
        if not self.changed:
            self.changed = True
            self.result = tree_map(lambda value: value.copied() if isinstance(value, _Held) else value, self.result)

    def replay(self) -> Any:
        """What the call returned, with the generators as it left them."""
        for device, state in self.random.items():
            _generator_of(device).set_rng_state(state, *([device] if device.type != "cpu" else []))
        # What was changed in place will be so again.
        own = (lambda tensor: tensor.clone()) if self.changed else _apart
        return tree_map(lambda value: own(value.tensor()) if isinstance(value, _Held) else value, self.result)


class _Calls(TorchDispatchMode):
    """Numbers the calls of each operation whose result could be kept."""

    def __init__(self, kept: dict[tuple[Any, int], _Call]) -> None:
        super().__init__()
        self.kept = kept
        self.calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions that are compiled by themselves stay so, as in torch's own pair."""
        return True

    def call(self, operation: Any) -> tuple[Any, int] | None:
        """The name of this call, or `None` where its result is never kept."""
        if not _has_result_of_its_own(operation):
            return None
        self.calls[operation] += 1
        return operation, self.calls[operation]


class _Keeping(_Calls):
    """The first forward: keeps what is chosen."""

    def __init__(self, keeps: Keeps, kept: dict[tuple[Any, int], _Call], hooks: Hooks | None) -> None:
        super().__init__(kept)
        self.keeps, self.hooks = keeps, hooks
        self.by_storage: dict[int, list[_Call]] = {}
        # Calls since autograd last saved a tensor. The second forward may end there, and then never comes to them.
        self.beyond: list[tuple[Any, int]] = []
        self.noting: Any = None

    def __enter__(self) -> Any:
        hooks = _hooks()
        if hooks is not None:
            self.noting = saved_tensors_hooks(self.note_before(hooks[0]), hooks[1])
            self.noting.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.noting is not None:
            self.noting.__exit__(*error)
            # The graph keeps this function, through which it must not keep the hooks around it. torch.utils.checkpoint.
            self.noting.pack_hook.__dict__.pop("_user_hooks", None)
            for name in self.beyond:
                del self.kept[name]
        self.by_storage.clear()

    def note_before(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The hook of the checkpoint, called when autograd saves a tensor: the second forward comes this far at least."""
        kept, hooks, beyond = self.kept, self.hooks, self.beyond

        def noting(tensor: Tensor) -> Any:
            if hooks is not None:
                for name in beyond:
                    kept[name].pack(hooks)
            beyond.clear()
            return pack(tensor)

        # By these torch tells the hooks of checkpoints from those of users.
        noting.__dict__.update(pack.__dict__)
        return noting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.by_storage:
            for tensor in _changed_by(func, args, kwargs):
                for call in self.by_storage.pop(tensor.untyped_storage()._cdata, ()):
                    call.spare()
        result = func(*args, **kwargs)
        name = self.call(func)
        if name is not None and self.keeps(func, args, kwargs, result):
            self.kept[name] = call = _Call(func, result)
            self.beyond.append(name)
            for tensor in _tensors(result):
                self.by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(call)
        return result


class _Replaying(_Calls):
    """The second forward: gives back what was kept and runs the rest. Several times, where the graph is retained."""

    def __enter__(self) -> Any:
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.call(func)
        if name in self.kept:
            return self.kept[name].replay()
        return func(*args, **(kwargs or {}))


def _hooks() -> Hooks | None:
    """The saved-tensor hooks that are active here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _apart(tensor: Tensor) -> Tensor:
    """The same values and version without a graph. Within a dispatch mode views share no version unless told to."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _changed_by(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given.get(name) for name in written])


def _generator_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _random_states(result: Any) -> dict[torch.device, Tensor]:
    """States of the generators on the devices of a result."""
    devices = {tensor.device for tensor in _tensors(result)}
    return {
        device: _generator_of(device).get_rng_state(*([device] if device.type != "cpu" else []))
        for device in devices
        if device.type == "cpu" or getattr(_generator_of(device), "_initialized", False)
    }
