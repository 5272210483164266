"""Masked-language-model training of a BERT on docstrings of installed packages, or on your own `.txt` files.

    python -m fasttrain --config configs/bert_docstrings.yaml
    torchrun --nproc-per-node 8 -m fasttrain --config configs/bert_base_mlm.yaml data.files=~/texts
    python -m fasttrain --config configs/bert_gcide.yaml      # a dictionary; scripts/fetch_data gcide gets it

The output layer is computed for the hidden tokens alone. With `data.layout: full` documents are joined into full sequences,
so attention needs no mask and takes its fastest kernel; the other layouts keep each document apart (docs/text.md). The mean
of the loss is over hidden tokens, however they are spread over microbatches and ranks.

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
    Layout,
    OwnTexts,
    Sequences,
    TextConfig,
    corpus,
    mask_tokens,
    masked_positions,
    unigram_entropy,
)
from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import F, np, torch
from recipes import sets

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


@dataclass(frozen=True, kw_only=True)
class Text(TextConfig):
    """Which text. `set`: one that scripts/fetch_data gets (gcide), instead of `files` and `packages`."""

    set: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.set is not None and self.set not in SETS:
            raise ConfigError(f"data.set={self.set} is no text to train on; {did_you_mean(self.set, SETS)}")

    def own(self) -> OwnTexts | None:
        """The texts of `set`.

        Raises:
            ConfigError: it has not been fetched.
        """
        return None if self.set is None else OwnTexts([sets.path_of(self.set)], SETS[self.set])


def gcide() -> list[str]:
    """The entries of the dictionary, each on one line."""
    return [" ".join(entry.split()) for entry in sets.gcide_entries()]


SETS = {"gcide": gcide}


class Bert(Trainer):
    """Guess hidden words."""

    unit = "tokens"

    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        """Settings of the run, the model and the text.

        `chunked_loss` trains without ever holding the scores of all hidden tokens (docs/losses.md).
        """

        model: Model = field(default_factory=Model)
        data: Text = field(default_factory=Text)
        chunked_loss: bool = False

    text: Corpus
    layout: Layout
    unigram_entropy: float

    def build_data(self) -> Data:
        """Sequences; masks are drawn anew each epoch, those of the held-out part once for all runs."""
        self.text = corpus(self.config.data, self.config.data.own())
        if self.config.data.layout == "full":
            held_out = self.hide(self.text.held_out, torch.Generator().manual_seed(HELD_OUT_MASKS))
            self.unigram_entropy = unigram_entropy(held_out["labels"])
            return Data(train=self.text.train, evaluation=held_out, transform=self.hide)
        self.layout = Layout(self.config.data, {"tokens": self.text.pad_id, "labels": IGNORED})
        train, held_out = self.text.train, self._masked_once(self.text.held_out)
        self.unigram_entropy = unigram_entropy(torch.from_numpy(held_out.of_tokens["labels"]))
        return Data(
            # Hidden sample by sample, whose draws follow from (seed, epoch, index) whoever reads it.
            train=Sequences(train.ends, train.of_tokens, transform=self.hide_one),
            evaluation=held_out.sorted_by_length(),
            lengths=train.lengths if self.config.data.group_by_length else None,
            collate=self.layout.collate,
            lay_out=self.lay_out,
        )

    def _masked_once(self, sequences: Sequences) -> Sequences:
        flat = torch.from_numpy(sequences.of_tokens["tokens"].astype(np.int64))
        hidden = self.hide_one({"tokens": flat}, torch.Generator().manual_seed(HELD_OUT_MASKS))
        return Sequences(sequences.ends, {name: entry.numpy() for name, entry in hidden.items()})

    def hide_one(self, sample: dict[str, Any], generator: Any = None) -> dict[str, Any]:
        """A sequence: tokens `[L]` with some hidden, and labels `[L]`: what these were."""
        tokens, labels = mask_tokens(
            sample["tokens"],
            vocabulary=self.text.vocabulary,
            mask_id=self.text.mask_id,
            special_ids=self.text.special_ids,
            probability=self.config.data.mask_probability,
            generator=generator,
        )
        return {"tokens": tokens, "labels": labels}

    def hide(self, tokens: Any, generator: Any = None) -> dict[str, Any]:
        """A batch: tokens `[B, S]` with some hidden, positions `[B, P]` of these, labels `[B, P]`: what they were."""
        return self.located(self.hide_one({"tokens": tokens}, generator))

    def located(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with the labels `[B, P]` of the hidden tokens alone, and where these are: positions `[B, P]`."""
        positions, labels = masked_positions(batch["labels"])
        return {**batch, "positions": positions, "labels": labels}

    def lay_out(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A microbatch of separate documents as `data.layout` says."""
        return self.located(self.layout.lay_out(batch))

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
        """Tokens, padding mask, no token types, where scores are wanted, labels if the model makes the loss, boundaries."""
        labels = batch["labels"] if self.config.chunked_loss and self.model.training else None
        return batch["tokens"], batch.get("mask"), None, batch["positions"], labels, batch.get("boundaries")

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

    def as_text(self, batch: Any) -> list[str]:
        """The tokens of a batch, hidden ones as the model sees them."""
        tokenizer = self.text.tokenizer()
        return tokenizer.decode_batch(batch["tokens"].tolist(), skip_special_tokens=False)
