"""Text for training: corpus, tokenizers, sequences, masked words, and how sequences lie in a batch."""

from fasttrain.data.text.config import LAYOUTS, LayoutConfig, TextConfig
from fasttrain.data.text.corpus import Corpus, OwnTexts, cache_folder, corpus
from fasttrain.data.text.layout import Layout
from fasttrain.data.text.masks import IGNORED, is_maskable, mask_tokens, masked_positions, unigram_entropy
from fasttrain.data.text.sequences import Sequences, full_sequences, separate_sequences
from fasttrain.data.text.tokenizer import (
    SPECIAL,
    encode,
    load_tokenizer,
    special_ids,
    train_bpe,
    train_wordpiece,
)

__all__ = [
    "IGNORED",
    "LAYOUTS",
    "SPECIAL",
    "Corpus",
    "Layout",
    "LayoutConfig",
    "OwnTexts",
    "Sequences",
    "TextConfig",
    "cache_folder",
    "corpus",
    "encode",
    "full_sequences",
    "is_maskable",
    "load_tokenizer",
    "mask_tokens",
    "masked_positions",
    "separate_sequences",
    "special_ids",
    "train_bpe",
    "train_wordpiece",
    "unigram_entropy",
]
