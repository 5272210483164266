"""Masked words: which tokens of a batch are hidden, and how well a guess without context could do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fasttrain.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # the label of a token that is not predicted: F.cross_entropy's default `ignore_index`


def mask_tokens(
    tokens: Tensor,
    *,
    vocabulary: int,
    mask_id: int,
    special_ids: Sequence[int],
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide tokens for the model to find: inputs and labels, both int64 and of the shape of `tokens`.

    Each token that is not special is chosen with `probability`. Of the chosen ones 80 % become [MASK], 10 % a random
    token, 10 % stay as they are; their labels are the true tokens, all other labels -100. Draws one uniform and one
    integer per token from `generator`, or from torch's global one.
    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.1.
    """
    tokens = tokens.long()
    draw = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    random_tokens = torch.randint(vocabulary, tokens.shape, generator=generator, device=tokens.device)
    maskable = is_maskable(tokens, special_ids)
    chosen = maskable & (draw < probability)
    inputs = tokens.masked_fill(maskable & (draw < 0.8 * probability), mask_id)
    inputs = torch.where(chosen & (draw >= 0.9 * probability), random_tokens, inputs)
    return inputs, tokens.masked_fill(~chosen, IGNORED)


def is_maskable(tokens: Tensor, special_ids: Sequence[int]) -> Tensor:
    """Which tokens are not special; boolean, of the shape of `tokens`."""
    return ~torch.isin(tokens, torch.as_tensor(special_ids, dtype=tokens.dtype, device=tokens.device))


def masked_positions(labels: Tensor, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """Where the labels `[batch, sequence]` are, so that the output layer is computed there alone.

    Returns positions and labels, both `[batch, most]`: `most` is the largest number of labels in a row, rounded up to a
    `multiple`. Rows with fewer are filled up with positions whose label is -100, which count for nothing.
    Saves: 3/4 of the output layer and of its logits at 15 % masked tokens.

    >>> positions, kept = masked_positions(torch.tensor([[-100, 7, -100, 9], [-100, -100, 5, -100]]), multiple=1)
    >>> positions.tolist(), kept.tolist()
    ([[1, 3], [2, 0]], [[7, 9], [5, -100]])
    """
    is_label = labels != IGNORED
    most = int(is_label.sum(1).max()) if labels.numel() else 0
    most = min(max(-(-most // multiple), 1) * multiple, labels.shape[1])
    positions = torch.argsort(~is_label, dim=1, stable=True)[:, :most].contiguous()
    return positions, labels.gather(1, positions)


def unigram_entropy(ids: Tensor, special_ids: Sequence[int] = ()) -> float:
    """Entropy in nats of the frequencies of tokens; special tokens and labels of -100 are left out.

    No model that ignores the context has a lower mean loss on these tokens, not even one that knew their frequencies.
    So a masked-language model has learned from context only as far as its loss is below this.

    >>> round(unigram_entropy(torch.tensor([4, 4, 5, 6, -100])), 4)  # 3/2 ln 2
    1.0397
    """
    ids = ids[is_maskable(ids, [*special_ids, IGNORED])]
    if not ids.numel():
        return 0.0
    share = torch.unique(ids, return_counts=True)[1].double() / ids.numel()
    return math.fsum((-share * share.log()).tolist())
