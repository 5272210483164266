"""Masked-language-model training of a BERT on docstrings of installed packages, or on your own `.txt` files.

    python -m fasttrain --config configs/bert_docstrings.yaml
    torchrun --nproc-per-node 8 -m fasttrain --config configs/bert_base_mlm.yaml data.files=~/texts

The output layer is computed for the hidden tokens alone. Sequences are full, so attention needs no mask and takes its
fastest kernel. The mean of the loss is over hidden tokens, however they are spread over microbatches and ranks.

`recipes/flat/bert.py` is the same training in plain PyTorch.
Source: Devlin et al. 2018, arXiv:1810.04805; without next-sentence prediction, as Liu et al. 2019, arXiv:1907.11692.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fasttrain import Data, Trainer
from fasttrain.data.text import (
    IGNORED,
    Corpus,
    TextConfig,
    corpus,
    mask_tokens,
    masked_positions,
    unigram_entropy,
)
from fasttrain.lazy import F, torch

HELD_OUT_MASKS = 0  # the seed of the masks that every run is evaluated on


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the model (the defaults are tiny). Its vocabulary and longest sequence come from the data."""

    width: int = 128
    layers: int = 2
    heads: int = 2
    feedforward: int = 512
    dropout: float = 0.0
    initial_std: float = 0.08


class Bert(Trainer):
    """Guess hidden words."""

    unit = "tokens"

    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        """Settings of the run, the model and the text.

        `chunked_loss` trains without ever holding the scores of all hidden tokens (docs/losses.md).
        """

        model: Model = field(default_factory=Model)
        data: TextConfig = field(default_factory=TextConfig)
        chunked_loss: bool = False

    text: Corpus
    unigram_entropy: float

    def build_data(self) -> Data:
        """Packed sequences; masks are drawn anew each epoch, those of the held-out part once for all runs."""
        self.text = corpus(self.config.data)
        held_out = self.hide(self.text.held_out, torch.Generator().manual_seed(HELD_OUT_MASKS))
        self.unigram_entropy = unigram_entropy(held_out["labels"])
        return Data(train=self.text.train, evaluation=held_out, transform=self.hide)

    def hide(self, tokens: Any, generator: Any = None) -> dict[str, Any]:
        """A batch: tokens `[B, S]` with some hidden, positions `[B, P]` of these, labels `[B, P]`: what they were."""
        tokens, labels = mask_tokens(
            tokens,
            vocabulary=self.text.vocabulary,
            mask_id=self.text.mask_id,
            special_ids=self.text.special_ids,
            probability=self.config.data.mask_probability,
            generator=generator,
        )
        positions, labels = masked_positions(labels)
        return {"tokens": tokens, "positions": positions, "labels": labels}

    def build_model(self) -> Any:
        """A BERT with a masked-word head; its vocabulary is rounded up to 64, which matrix kernels like."""
        from fasttrain.models.bert import BertForMaskedLM
        from fasttrain.models.bert_config import BertConfig

        model = self.config.model
        return BertForMaskedLM(
            BertConfig(
                vocabulary=-(-self.text.vocabulary // 64) * 64,
                width=model.width,
                layers=model.layers,
                heads=model.heads,
                feedforward=model.feedforward,
                positions=self.config.data.sequence_length,
                dropout=model.dropout,
                initial_std=model.initial_std,
            )
        )

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Tokens, neither padding mask nor token types, where scores are wanted, and labels if the model makes the loss."""
        labels = batch["labels"] if self.config.chunked_loss and self.model.training else None
        return batch["tokens"], None, None, batch["positions"], labels

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy over hidden tokens, of their scores; the model may have made it itself."""
        if output.dim() == 0:
            return output
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def count(self, batch: Any) -> Any:
        """Hidden tokens: what the mean is over."""
        return (batch["labels"] != IGNORED).sum()

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        """Share of hidden tokens guessed right."""
        is_label = batch["labels"] != IGNORED
        right = (output.argmax(-1) == batch["labels"]) & is_label
        return {"accuracy": right.sum() / is_label.sum()}

    def evaluate(self) -> dict[str, float]:
        """Adds the perplexity, and the unigram entropy: the loss that no guess without context can be below."""
        result = super().evaluate()
        result["perplexity"] = math.exp(result["loss"])
        result["unigram_entropy"] = self.unigram_entropy
        return result
