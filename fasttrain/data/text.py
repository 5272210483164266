"""Text for masked-language-model training: corpus, vocabulary, fixed sequences, masks.

Everything is made on this machine from what is installed (or from your own `.txt` files) and kept in a cache folder:
`~/.cache/fasttrain`, or what the environment variable FASTTRAIN_CACHE says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.data import documents
from fasttrain.errors import ConfigError, RunError
from fasttrain.lazy import np, require, torch

if TYPE_CHECKING:
    from torch import Tensor

PAD, UNKNOWN, START, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # the label of a token that is not predicted: F.cross_entropy's default `ignore_index`
_LAYOUT = 1  # of the cache folder; raise it when what is written or how text is cleaned changes


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text, how many tokens the vocabulary has, how it is cut and masked.

    `files`: a folder of `.txt` files (documents apart by blank lines); null reads docstrings of `packages`.
    `max_bytes`: of text after cleaning; null: all. `held_out`: share of the documents.
    """

    files: str | None = None
    packages: list[str] = field(default_factory=lambda: list(documents.PACKAGES))
    max_bytes: int | None = None
    vocabulary: int = 8192
    sequence_length: int = 128
    held_out: float = 0.05
    mask_probability: float = 0.15

    def __post_init__(self) -> None:
        if self.vocabulary < 256:
            raise ConfigError(
                f"data.vocabulary={self.vocabulary} leaves no room beside the characters; use 256 or more."
            )
        if self.sequence_length < 3:
            raise ConfigError(
                f"data.sequence_length={self.sequence_length} leaves no room for text beside {START}; use 3 or more."
            )
        for name in ("held_out", "mask_probability"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} is no share; use a number between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sequences of token ids, `[sequences, sequence_length]`, mapped from the cache; and what the ids mean."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    special_ids: tuple[int, ...]
    mask_id: int
    folder: Path

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` that made the ids."""
        return _tokenizers().Tokenizer.from_file(str(self.folder / "tokenizer.json"))


def corpus(config: TextConfig) -> Corpus:
    """The sequences for a config: from the cache, or made now (about half a minute for the default) and kept there.

    Ranks and runs that start at once may each make it; all make the same, and the first to finish is kept.

    Raises:
        ConfigError: a package or folder is missing, or there is too little text.
        MissingPackage: the package `tokenizers` is not installed.
        RunError: the cache was damaged.
    """
    _tokenizers()
    files = documents.text_files(config.files) if config.files is not None else None
    folder = cache_folder() / "text" / _key(config, files)
    if not folder.is_dir():
        if files is not None:
            texts = documents.paragraphs(files, max_bytes=config.max_bytes)
        else:
            texts = documents.docstrings(config.packages, max_bytes=config.max_bytes)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            made = Path(making) / "corpus"
            made.mkdir()
            _write(made, texts, config)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was first, with the same content
                    raise
    return _read(folder)


def cache_folder() -> Path:
    """Where prepared data is kept."""
    return Path(os.environ.get("FASTTRAIN_CACHE") or Path.home() / ".cache" / "fasttrain").expanduser()


def _key(config: TextConfig, files: list[Path] | None) -> str:
    """A name for all that decides the sequences: settings, source files, versions."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("files", "mask_probability")}
    if files is not None:
        del settings["packages"]
        sources = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    else:
        sources = [(str(f), f.stat().st_size) for package in config.packages for f in documents.python_files(package)]
    versions = [_LAYOUT, platform.python_version(), metadata.version("tokenizers")]
    return hashlib.blake2b(json.dumps([settings, sources, versions]).encode(), digest_size=16).hexdigest()


def _tokenizers() -> Any:
    return require("tokenizers", needed_by="the text data", install="pip install 'fasttrain[recipes]'")


def _write(folder: Path, texts: list[str], config: TextConfig) -> None:
    tokenizer = train_wordpiece(texts, config.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    start, separator = tokenizer.token_to_id(START), tokenizer.token_to_id(SEPARATOR)
    sides = {
        "train": [text for text in texts if not documents.is_held_out(text, config.held_out)],
        "held_out": [text for text in texts if documents.is_held_out(text, config.held_out)],
    }
    for name, side in sides.items():
        sequences = pack(encode(tokenizer, side), config.sequence_length, start=start, separator=separator)
        if not len(sequences):
            raise ConfigError(
                f"data: {len(side)} documents of the {name} part fill no sequence of {config.sequence_length} tokens; "
                "give more text (data.packages, data.files, data.max_bytes) or a shorter data.sequence_length."
            )
        np.save(folder / f"{name}.npy", sequences)
    facts = {
        "vocabulary": tokenizer.get_vocab_size(),
        "special_ids": [tokenizer.token_to_id(token) for token in SPECIAL],
        "mask_id": tokenizer.token_to_id(MASK),
        "documents": {name: len(side) for name, side in sides.items()},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def _read(folder: Path) -> Corpus:
    try:
        facts = json.loads((folder / "facts.json").read_text())
        # Copy on write: torch wants memory that may be written to; the file itself stays as it is.
        parts = {n: torch.from_numpy(np.load(folder / f"{n}.npy", mmap_mode="c")) for n in ("train", "held_out")}
        special = tuple(facts["special_ids"])
        return Corpus(
            **parts, vocabulary=facts["vocabulary"], special_ids=special, mask_id=facts["mask_id"], folder=folder
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"the prepared text in {folder} cannot be read ({error}); delete that folder, and it is made again."
        ) from error


def train_wordpiece(texts: Sequence[str], vocabulary: int) -> Any:
    """A lower-case WordPiece tokenizer of at most `vocabulary` tokens, learned from the texts.

    The same texts give the same tokens and ids. The library alone does not see to that: it numbers the pieces `##a`,
    `##b`, ... in the order of a randomly seeded hash map, and ties between merges are decided by these numbers (checked
    with tokenizers 0.23.3, with one thread too). So they are numbered beforehand here.
    Source: Schuster & Nakajima 2012; Devlin et al. 2018, arXiv:1810.04805.
    """
    tokenizers = _tokenizers()
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(normalizer.normalize_str(text))
    by_frequency = sorted(characters, key=lambda c: (-characters[c], c))
    # A corpus may hold thousands of rare signs; these become [UNK] and leave room for words.
    alphabet = sorted([c for c in by_frequency if not c.isspace()][: min(1000, vocabulary // 4)])
    dropped = {ord(c): " " for c in characters if c not in set(alphabet)}

    learner = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=UNKNOWN))
    learner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[*SPECIAL, *alphabet, *(f"##{c}" for c in alphabet)],
        show_progress=False,
    )
    learner.train_from_iterator((normalizer.normalize_str(text).translate(dropped) for text in texts), trainer)

    # A fresh one, in which no token is special to the parser: a text that says "[MASK]" is split like any other.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=learner.get_vocab(), unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> Iterable[list[int]]:
    """Token ids of each text, without special tokens; some thousand texts at a time."""
    for first in range(0, len(texts), 4096):
        for encoding in tokenizer.encode_batch(texts[first : first + 4096], add_special_tokens=False):
            yield encoding.ids


def pack(documents: Iterable[Sequence[int]], sequence_length: int, *, start: int, separator: int) -> Any:
    """Cut documents into full sequences: `[CLS] tokens [SEP]`, documents within one apart by `[SEP]`; no padding.

    Returns an array `[sequences, sequence_length]` of int16 where the ids allow it, else int32. What does not fill a
    last sequence is left out.
    Source: FULL-SENTENCES of Liu et al. 2019, arXiv:1907.11692.

    >>> pack([[11, 12, 13], [14, 15, 16, 17]], 5, start=1, separator=2).tolist()
    [[1, 11, 12, 13, 2], [1, 2, 14, 15, 2]]
    """
    pieces = [np.asarray([*document, separator], dtype=np.int32) for document in documents]
    stream = np.concatenate(pieces)[:-1] if pieces else np.zeros(0, dtype=np.int32)
    inner = sequence_length - 2
    body = stream[: len(stream) // inner * inner].reshape(-1, inner)
    dtype = np.int16 if not len(body) or body.max() < 2**15 else np.int32
    sequences = np.empty((len(body), sequence_length), dtype=dtype)
    sequences[:, 0], sequences[:, 1:-1], sequences[:, -1] = start, body, separator
    return sequences


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
