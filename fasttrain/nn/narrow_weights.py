"""Weights, activations and gradients in 16 bits, with float32 where digits are needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fasttrain.nn.full_precision import run_in_float32, widened


def narrow_weights(
    model: nn.Module, dtype: torch.dtype, float32: Iterable[nn.Module] = (), device_type: str = "cpu"
) -> int:
    """Let a model keep weights, activations and gradients in `dtype`, but for the modules of `float32`.

    In place: parameters stay the same objects under the same names; one that a module of `float32` shares stays float32.

    - Each layer casts its floating inputs to the dtype of its own weights, so that activations are narrow wherever they
      come from. Floating inputs of the model of two dims or more are cast at its door (not where modules of `float32` may
      want all their digits); numbers a sample (`[B]`: times, noise levels) are left to the layers, as bfloat16 cannot
      tell 997 from 996. The model gives float32, so that softmax and loss are computed in it.
    - LayerNorm, GroupNorm and RMSNorm keep narrow weights: torch's kernels compute them, and softmax, in float32 and
      round once. Norms with running statistics stay float32 (in 8 bits of mantissa, 0.1 of a small change is lost), and
      take narrow inputs.
    - Buffers are left as they are: statistics, tables of positions and frequencies.

    Saves: half of weights, gradients and activations. Costs: 16 of 23 mantissa bits in each of them.
    Needs: updates that are rounded stochastically, or small ones vanish. Returns the number of narrow parameters.
    """
    apart = list(float32)
    run_in_float32(apart, device_type)
    wide = {id(part) for module in apart for part in module.modules()}
    wide |= {id(part) for part in model.modules() if isinstance(part, _NormBase) and part.track_running_stats}
    kept = {id(p) for part in model.modules() if id(part) in wide for p in part._parameters.values() if p is not None}
    narrowed = 0
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
            narrowed += 1
    for part in model.modules():
        own = next((p.dtype for p in part._parameters.values() if p is not None and p.is_floating_point()), None)
        if own is not None and id(part) not in wide:
            part.register_forward_pre_hook(partial(_cast_inputs, dtype=own, least=0), with_kwargs=True)
    if not apart:
        model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype, least=2), with_kwargs=True)
    model.register_forward_hook(_widen_output)
    return narrowed


def _cast_inputs(module: Any, args: Any, kwargs: Any, *, dtype: torch.dtype, least: int) -> Any:
    return _cast(args, dtype, least), _cast(kwargs, dtype, least) if kwargs else kwargs


def _cast(tree: Any, dtype: torch.dtype, least: int) -> Any:
    if isinstance(tree, torch.Tensor):
        casts = tree.is_floating_point() and tree.dtype != dtype and tree.dim() >= least
        return tree.to(dtype) if casts else tree
    if type(tree) in (tuple, list):
        return type(tree)(_cast(item, dtype, least) for item in tree)
    if type(tree) is dict:
        return {key: _cast(item, dtype, least) for key, item in tree.items()}
    return tree


def _widen_output(module: Any, args: Any, output: Any) -> Any:
    return output.float() if type(output) is torch.Tensor and output.dtype == torch.bfloat16 else widened(output)
