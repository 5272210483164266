"""Settings of text data; needs neither torch nor numpy, so that configs can hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fasttrain.data import documents
from fasttrain.data.text.tokenizer import LEARNED, SPECIAL, START
from fasttrain.errors import ConfigError, did_you_mean

LAYOUTS = ("padded", "packed", "unpadded")


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How sequences of various lengths lie in a batch (docs/text.md). None of it changes the loss of a batch.

    `layout`: `padded` to the longest of the microbatch; `packed` several to a row of at most `row_length` tokens (null:
    `sequence_length`), attending to themselves alone; `unpadded` all in one row. `multiple`: rows end at a multiple of it.
    `sequence_length`: longest sequence, [CLS] and [SEP] included. `group_by_length`: batches of sequences about as long;
    this one changes which sequences meet in a batch.
    """

    layout: str = "padded"
    sequence_length: int = 128
    row_length: int | None = None
    multiple: int = 8
    group_by_length: bool = False

    def __post_init__(self) -> None:
        self._check_layout(LAYOUTS)
        if self.sequence_length < 3:
            raise ConfigError(
                f"data.sequence_length={self.sequence_length} leaves no room for text beside {START}; use 3 or more."
            )
        if self.row_length is not None and self.row_length < self.sequence_length:
            raise ConfigError(
                f"data.row_length={self.row_length} cannot hold a sequence of data.sequence_length="
                f"{self.sequence_length}; use {self.sequence_length} or more."
            )
        if self.multiple < 1:
            raise ConfigError(f"data.multiple={self.multiple} is no size; use 1 or more, 8 for matrix kernels of GPUs.")

    def _check_layout(self, known: tuple[str, ...]) -> None:
        if self.layout not in known:
            raise ConfigError(f"data.layout={self.layout} is not known; {did_you_mean(self.layout, known)}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(LayoutConfig):
    """Which text, how many tokens the vocabulary has, how it is cut and masked.

    `files`: a folder of `.txt` files (documents apart by blank lines); null reads docstrings of `packages`.
    `max_bytes`: of text after cleaning; null: all. `held_out`: share of the documents. `tokenizer`: `wordpiece` or `bpe`,
    learned from the text with `vocabulary` tokens, or the path of a tokenizer.json or vocab.txt.
    `layout`: `full` joins documents into sequences without padding; the others keep each document apart, cut into pieces
    of `sequence_length` where it is longer.
    """

    layout: str = "full"
    files: str | None = None
    packages: list[str] = field(default_factory=lambda: list(documents.PACKAGES))
    max_bytes: int | None = None
    tokenizer: str = "wordpiece"
    vocabulary: int = 8192
    held_out: float = 0.05
    mask_probability: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer in LEARNED:
            least = 256 if self.tokenizer == "wordpiece" else 256 + len(SPECIAL)
            if self.vocabulary < least:
                raise ConfigError(
                    f"data.vocabulary={self.vocabulary} leaves no room beside the characters; use {least} or more."
                )
        for name in ("held_out", "mask_probability"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} is no share; use a number between 0 and 1.")
        if self.layout == "full" and self.group_by_length:
            raise ConfigError(
                "data.group_by_length=true with data.layout=full: full sequences are all of one length; set "
                "data.layout=padded (or packed, unpadded) to keep documents apart, or group_by_length=false."
            )

    def _check_layout(self, known: tuple[str, ...]) -> None:
        super()._check_layout(("full", *known))
