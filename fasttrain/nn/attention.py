"""Attention of sequences that stand one after another: each token looks at its own sequence alone."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.nn.boundaries import Boundaries


def attend_within(query: Tensor, key: Tensor, value: Tensor, within: Boundaries, dropout: float = 0.0) -> Tensor:
    """Attention of all sequences at once, `[T, H, D]` each, T tokens of all of them; the same shape comes out.

    On CUDA in 16 bits one kernel does all (`varlen_attn`). Elsewhere one call a sequence: no mask is needed then, and on a
    CPU that takes half the time of one call with a mask (docs/text.md).
    """
    if takes_varlen(query.device, query.dtype, query.shape[-1], dropout):
        from torch.nn.attention.varlen import varlen_attn

        cuts, longest = within.cu_seqlens, within.longest
        # By position: torch 2.11 and 2.14 agree on these seven and differ in those that follow.
        output = varlen_attn(query, key, value, cuts, cuts, longest, longest)
        assert isinstance(output, Tensor)
        return output
    attended = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1).unsqueeze(0) for x in qkv), dropout_p=dropout)
        for qkv in zip(*(x.split(within.lengths) for x in (query, key, value)), strict=True)
    ]
    return torch.cat([x.squeeze(0).transpose(0, 1) for x in attended])


def takes_varlen(device: torch.device, dtype: torch.dtype, head_width: int, dropout: float) -> bool:
    """Whether torch's attention for variable lengths can do it: CUDA from Ampere on, 16 bits, no dropout."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_width % 8 == 0
        and head_width <= 256
        and dropout == 0
        and _is_ampere(device)
    )


def needs_mask(device: torch.device, rows: int, dtype: torch.dtype, head_width: int, dropout: float) -> bool:
    """Whether rows of sequences are better attended to with a mask: on a GPU, where one call a sequence costs most.

    `dtype`: of queries and keys. One row (an unpadded batch) never needs one: its mask would be T x T.
    """
    if device.type == "cpu" or rows == 1 or takes_varlen(device, dtype, head_width, dropout):
        return False
    _tell_once(f"{device.type}, {dtype}, heads of {head_width}, attention dropout {dropout}")
    return True


def block_diagonal(within: Boundaries, rows: int) -> Tensor:
    """The mask `[R, 1, S, S]` of rows of sequences: true where two tokens of a row are of one sequence."""
    stretches = within.stretches().view(rows, -1)
    return (stretches[:, :, None] == stretches[:, None, :]).unsqueeze(1)


@lru_cache(maxsize=8)
def _is_ampere(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@lru_cache(maxsize=8)
def _tell_once(case: str) -> None:
    logging.getLogger(__name__).warning(
        "packed sequences attend with a mask here (%s); precision=bf16 and attention_dropout=0 take torch's kernel for "
        "variable lengths, from heads of a multiple of 8 and compute capability 8.0 on",
        case,
    )
