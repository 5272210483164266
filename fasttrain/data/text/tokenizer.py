"""Tokenizers: WordPiece and byte-level BPE learned here, or one that is brought along."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import require

PAD, UNKNOWN, START, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# What RoBERTa and its kin call them.
_OTHER_NAMES = {PAD: "<pad>", UNKNOWN: "<unk>", START: "<s>", SEPARATOR: "</s>", MASK: "<mask>"}
LEARNED = ("wordpiece", "bpe")


def tokenizers() -> Any:
    """The package `tokenizers`.

    Raises:
        MissingPackage: it is not installed.
    """
    return require("tokenizers", needed_by="the text data", install="pip install 'fasttrain[recipes]'")


def learn(kind: str, texts: Sequence[str], vocabulary: int) -> Any:
    """A tokenizer of a kind (`wordpiece` or `bpe`), learned from texts; the same texts give the same tokens and ids."""
    return {"wordpiece": train_wordpiece, "bpe": train_bpe}[kind](texts, vocabulary)


def train_wordpiece(texts: Sequence[str], vocabulary: int) -> Any:
    """A lower-case WordPiece tokenizer of at most `vocabulary` tokens, learned from the texts.

    The same texts give the same tokens and ids. The library alone does not see to that: it numbers the pieces `##a`,
    `##b`, ... in the order of a randomly seeded hash map, and ties between merges are decided by these numbers (checked
    with tokenizers 0.23.3, with one thread too). So they are numbered beforehand here.
    Source: Schuster & Nakajima 2012; Devlin et al. 2018, arXiv:1810.04805.
    """
    library = tokenizers()
    normalizer = library.normalizers.BertNormalizer(lowercase=True)
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(normalizer.normalize_str(text))
    by_frequency = sorted(characters, key=lambda c: (-characters[c], c))
    # A corpus may hold thousands of rare signs; these become [UNK] and leave room for words.
    alphabet = sorted([c for c in by_frequency if not c.isspace()][: min(1000, vocabulary // 4)])
    dropped = {ord(c): " " for c in characters if c not in set(alphabet)}

    learner = library.Tokenizer(library.models.WordPiece(unk_token=UNKNOWN))
    learner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[*SPECIAL, *alphabet, *(f"##{c}" for c in alphabet)],
        show_progress=False,
    )
    learner.train_from_iterator((normalizer.normalize_str(text).translate(dropped) for text in texts), trainer)

    # A fresh one, in which no token is special to the parser: a text that says "[MASK]" is split like any other.
    return _wordpiece(learner.get_vocab())


def train_bpe(texts: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, learned from the texts; case and every byte are kept.

    The same texts give the same tokens and ids: the 256 bytes are numbered first, in a fixed order, and ties between merges
    are decided by these numbers. Nothing is unknown to it.
    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes: Radford et al. 2019 (GPT-2).
    """
    library = tokenizers()
    split = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner = library.Tokenizer(library.models.BPE())
    learner.pre_tokenizer = split
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[*SPECIAL, *sorted(library.pre_tokenizers.ByteLevel.alphabet())],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)

    # A fresh one, as for WordPiece: a text that says "[MASK]" is split like any other.
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = library.Tokenizer(library.models.BPE(vocab=model["vocab"], merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def load_tokenizer(path: str | Path) -> Any:
    """A tokenizer of your own: a `tokenizer.json` of the package `tokenizers`, a BERT's `vocab.txt`, or a folder with one.

    A `tokenizer.json` may say to pad or to cut each text (that of MiniLM: to 128 tokens); both are turned off, and what a
    text says of special tokens is split like any other text. Of a `vocab.txt` it is taken that the text is lower-cased
    where no token has a capital letter.

    Raises:
        ConfigError: there is no such file, or it is none.
    """
    path = tokenizer_file(path)
    library = tokenizers()
    try:
        if path.suffix == ".json":
            tokenizer = library.Tokenizer.from_file(str(path))
        else:
            words = path.read_text(encoding="utf-8").splitlines()
            tokenizer = _wordpiece({word: i for i, word in enumerate(words)}, lower=_is_lower(words))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"tokenizer={path} cannot be read ({error}); name a tokenizer.json of the package tokenizers, or a vocab.txt "
            "with a token a line."
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_file(path: str | Path) -> Path:
    """The file that a setting `tokenizer` means: itself, or what a folder holds.

    Raises:
        ConfigError: there is none.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        found = next((found / name for name in ("tokenizer.json", "vocab.txt") if (found / name).is_file()), found)
    if not found.is_file():
        raise ConfigError(
            f"tokenizer={path}: no tokenizer.json and no vocab.txt is there; name such a file, or write one of "
            f"{', '.join(LEARNED)} to learn one from the text."
        )
    return found


def fingerprint(tokenizer: str) -> str:
    """What a setting `tokenizer` stands for: its name, or for a file a hash of what is in it."""
    return tokenizer if tokenizer in LEARNED else hashlib.blake2b(tokenizer_file(tokenizer).read_bytes()).hexdigest()


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the special tokens, by the names used here (`[PAD]`, `[UNK]`, ...); without `[UNK]` where there is none.

    Raises:
        ConfigError: another one is missing.
    """
    found = {}
    for name, other in _OTHER_NAMES.items():
        number = tokenizer.token_to_id(name)
        number = tokenizer.token_to_id(other) if number is None else number
        if number is not None:
            found[name] = number
        elif name != UNKNOWN:
            raise ConfigError(
                f"the tokenizer has neither {name} nor {other}, which a BERT is trained with; use one that has, or "
                f"tokenizer={LEARNED[0]} to learn one from the text."
            )
    return found


def _wordpiece(vocabulary: dict[str, int], *, lower: bool = True) -> Any:
    library = tokenizers()
    tokenizer = library.Tokenizer(library.models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


def _is_lower(words: Iterable[str]) -> bool:
    return all(word == word.lower() for word in words if not (word.startswith("[") and word.endswith("]")))


def encode(tokenizer: Any, texts: Sequence[str]) -> Iterable[list[int]]:
    """Token ids of each text, without special tokens; some thousand texts at a time."""
    for first in range(0, len(texts), 4096):
        for encoding in tokenizer.encode_batch(texts[first : first + 4096], add_special_tokens=False):
            yield encoding.ids
