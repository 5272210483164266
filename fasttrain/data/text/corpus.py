"""Prepared text: documents, a tokenizer and token sequences, made once and kept.

Everything is made on this machine from what is installed (or from your own files) and kept in a cache folder:
`~/.cache/fasttrain`, or what the environment variable FASTTRAIN_CACHE says.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fasttrain.data import documents
from fasttrain.data.text import tokenizer as tokenizing
from fasttrain.data.text.config import TextConfig
from fasttrain.data.text.sequences import Sequences, full_sequences, separate_sequences
from fasttrain.data.text.tokenizer import MASK, PAD, SEPARATOR, START
from fasttrain.data.whole import made_beside
from fasttrain.errors import ConfigError, RunError
from fasttrain.lazy import np, torch

_VERSION = 2  # of the cache folder; raise it when what is written or how text is cleaned changes
# Settings that change how sequences are batched or masked, not which there are.
_OF_BATCHES = {"mask_probability", "layout", "row_length", "multiple", "group_by_length"}


@dataclass(frozen=True)
class OwnTexts:
    """Documents that the caller reads: `read()` gives them, and the `files` they are read from."""

    files: Sequence[Path]
    read: Callable[[], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sequences of token ids, mapped from the cache; and what the ids mean.

    `train` and `held_out` are a tensor `[sequences, sequence_length]` with layout `full`, else `Sequences`.
    """

    train: Any
    held_out: Any
    vocabulary: int
    special_ids: tuple[int, ...]
    mask_id: int
    pad_id: int
    folder: Path

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` that made the ids."""
        return tokenizing.load_tokenizer(self.folder / "tokenizer.json")


def corpus(config: TextConfig, own: OwnTexts | None = None) -> Corpus:
    """The sequences for a config: from the cache, or made now (about half a minute for the default) and kept there.

    `own`: documents to take instead of those that the config names. Ranks and runs that start at once may each make it;
    all make the same, and the first to finish is kept.

    Raises:
        ConfigError: a package, folder or tokenizer is missing, or there is too little text.
        MissingPackage: the package `tokenizers` is not installed.
        RunError: the cache was damaged.
    """
    tokenizing.tokenizers()
    files = own.files if own is not None else documents.text_files(config.files) if config.files is not None else None
    folder = cache_folder() / "text" / _key(config, files)
    if not folder.is_dir():
        texts = _texts(config, own, files)
        with made_beside(folder) as made:
            made.mkdir()
            _write(made, texts, config)
    return _read(folder)


def cache_folder() -> Path:
    """Where prepared data is kept."""
    return Path(os.environ.get("FASTTRAIN_CACHE") or Path.home() / ".cache" / "fasttrain").expanduser()


def _texts(config: TextConfig, own: OwnTexts | None, files: Sequence[Path] | None) -> list[str]:
    if own is not None:
        return documents.arrange(own.read(), config.max_bytes)
    if files is not None:
        return documents.paragraphs(files, max_bytes=config.max_bytes)
    return documents.docstrings(config.packages, max_bytes=config.max_bytes)


def _key(config: TextConfig, files: Sequence[Path] | None) -> str:
    """A name for all that decides the sequences: settings, source files, versions."""
    settings = {name: value for name, value in asdict(config).items() if name not in {"files", *_OF_BATCHES}}
    settings |= {"tokenizer": tokenizing.fingerprint(config.tokenizer), "full": config.layout == "full"}
    if files is not None:
        del settings["packages"]
        sources = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    else:
        sources = [(str(f), f.stat().st_size) for package in config.packages for f in documents.python_files(package)]
    versions = [_VERSION, platform.python_version(), metadata.version("tokenizers")]
    return hashlib.blake2b(json.dumps([settings, sources, versions]).encode(), digest_size=16).hexdigest()


def _write(folder: Path, texts: list[str], config: TextConfig) -> None:
    if config.tokenizer in tokenizing.LEARNED:
        tokenizer = tokenizing.learn(config.tokenizer, texts, config.vocabulary)
    else:
        tokenizer = tokenizing.load_tokenizer(config.tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = tokenizing.special_ids(tokenizer)
    sides = {
        "train": [text for text in texts if not documents.is_held_out(text, config.held_out)],
        "held_out": [text for text in texts if documents.is_held_out(text, config.held_out)],
    }
    for name, side in sides.items():
        ids = tokenizing.encode(tokenizer, side)
        frame = {"start": special[START], "separator": special[SEPARATOR]}
        if config.layout == "full":
            sequences = full_sequences(ids, config.sequence_length, **frame)
        else:
            sequences, ends = separate_sequences(ids, config.sequence_length, **frame)
            np.save(folder / f"{name}_ends.npy", ends)
        if not len(sequences):
            raise ConfigError(
                f"data: {len(side)} documents of the {name} part fill no sequence of {config.sequence_length} tokens; "
                "give more text (data.packages, data.files, data.max_bytes) or a shorter data.sequence_length."
            )
        np.save(folder / f"{name}.npy", sequences)
    facts = {
        "vocabulary": tokenizer.get_vocab_size(),
        "special_ids": list(special.values()),
        "mask_id": special[MASK],
        "pad_id": special[PAD],
        "documents": {name: len(side) for name, side in sides.items()},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def _read(folder: Path) -> Corpus:
    try:
        facts = json.loads((folder / "facts.json").read_text())
        return Corpus(
            train=_sequences(folder, "train"),
            held_out=_sequences(folder, "held_out"),
            vocabulary=facts["vocabulary"],
            special_ids=tuple(facts["special_ids"]),
            mask_id=facts["mask_id"],
            pad_id=facts["pad_id"],
            folder=folder,
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"the prepared text in {folder} cannot be read ({error}); delete that folder, and it is made again."
        ) from error


def _sequences(folder: Path, side: str) -> Any:
    # Copy on write: torch wants memory that may be written to; the file itself stays as it is.
    tokens = np.load(folder / f"{side}.npy", mmap_mode="c")
    if tokens.ndim == 2:
        return torch.from_numpy(tokens)
    return Sequences(np.load(folder / f"{side}_ends.npy"), {"tokens": tokens})
