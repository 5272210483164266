"""Tokenizers: byte-level BPE that is the same everywhere, and files of one's own whose traps are off."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import tokenizers

from fasttrain.data import documents
from fasttrain.data.text import (
    SPECIAL,
    TextConfig,
    corpus,
    encode,
    load_tokenizer,
    special_ids,
    train_bpe,
    train_wordpiece,
)
from fasttrain.errors import ConfigError

PACKAGES = ["json", "email", "logging"]
ODD = "Ünïcode — 中文, 🙂, TABS\tand\nlines,  two spaces, \x00 and [MASK] [PAD]"


@pytest.fixture(scope="module")
def texts():
    return documents.docstrings(PACKAGES)


def test_bpe_is_the_same_in_another_process_with_another_number_of_threads(texts):
    code = (
        "import sys; from fasttrain.data import documents; from fasttrain.data.text import train_bpe\n"
        f"sys.stdout.write(train_bpe(documents.docstrings({PACKAGES}), 700).to_str())"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert len(made[0]) > 1000
    assert made[0] == made[1] == train_bpe(texts, 700).to_str()


def test_bpe_has_the_asked_size_special_tokens_first_and_gives_back_every_byte(texts):
    tokenizer = train_bpe(texts, 700)
    assert tokenizer.get_vocab_size() == 700
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(SPECIAL)
    (ids,) = encode(tokenizer, [ODD])
    assert tokenizer.decode(ids) == ODD
    assert not set(ids) & set(range(5))
    # Learned from this text, it takes fewer tokens than bytes.
    text = max(texts, key=len)
    assert len(next(iter(encode(tokenizer, [text])))) < 0.6 * len(text.encode())


def test_a_tokenizer_json_is_read_without_its_padding_and_cutting(tmp_path, texts):
    made = train_wordpiece(texts, 400)
    made.add_special_tokens(["[CLS]", "[SEP]", "[MASK]", "[PAD]"])
    made.enable_truncation(8)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(raw.encode(texts[0]).ids) == 8
    assert raw.token_to_id("[MASK]") in raw.encode("a [MASK]").ids
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    plain = train_wordpiece(texts, 400)
    several = [*texts[:20], "short", "a [MASK] of a [PAD]"]
    assert list(encode(loaded, several)) == list(encode(plain, several))


def test_a_vocab_txt_splits_as_the_tokenizer_it_was_written_by(tmp_path, texts):
    made = train_wordpiece(texts, 400)
    words = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    assert list(encode(load_tokenizer(tmp_path), texts[:50])) == list(encode(made, texts[:50]))


def test_a_vocab_txt_with_capitals_keeps_them(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "Paris", "paris"]))
    assert list(encode(load_tokenizer(tmp_path / "vocab.txt"), ["Paris paris"])) == [[5, 6]]


def test_special_tokens_are_known_by_the_names_of_roberta_too(tmp_path):
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    assert special_ids(made) == {"[PAD]": 1, "[UNK]": 3, "[CLS]": 0, "[SEP]": 2, "[MASK]": 4}
    without = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    with pytest.raises(ConfigError, match=r"neither \[MASK\] nor <mask>.*tokenizer=wordpiece"):
        special_ids(without)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer.json and no vocab.txt is there.*wordpiece, bpe"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)


# ---- in a corpus

SMALL = TextConfig(packages=PACKAGES, vocabulary=400, sequence_length=32, held_out=0.2)


def test_a_corpus_is_made_with_the_tokenizer_of_the_config(tmp_path, monkeypatch, texts):
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    train_wordpiece(texts, 300).save(str(tmp_path / "own.json"))
    wordpiece, bpe, own = (
        corpus(dataclasses.replace(SMALL, tokenizer=name)) for name in ("wordpiece", "bpe", str(tmp_path / "own.json"))
    )
    assert len({wordpiece.folder, bpe.folder, own.folder}) == 3
    assert [made.vocabulary for made in (wordpiece, bpe, own)] == [400, 400, 300]
    assert bpe.tokenizer().decode(bpe.train[0].tolist()[1:-1]) != wordpiece.tokenizer().decode(
        wordpiece.train[0].tolist()[1:-1]
    )
    # Another content under the same path is another entry.
    train_wordpiece(texts, 310).save(str(tmp_path / "own.json"))
    assert corpus(dataclasses.replace(SMALL, tokenizer=str(tmp_path / "own.json"))).vocabulary == 310


def test_documents_apart_hold_the_tokens_of_the_full_sequences(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    apart = corpus(dataclasses.replace(SMALL, layout="padded"))
    assert apart.folder == corpus(dataclasses.replace(SMALL, layout="packed", group_by_length=True)).folder
    full = corpus(SMALL)
    assert apart.folder != full.folder
    assert len(apart.train) > len(full.train) > 100
    assert apart.train.lengths.min() >= 3
    assert apart.train.lengths.max() == 32
    words = [token for i in range(len(apart.train)) for token in apart.train[i]["tokens"].tolist() if token > 4]
    joined = full.train[full.train > 4].tolist()
    assert words[: len(joined)] == joined


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "bpe", "vocabulary": 260}, "use 261 or more"),
        ({"layout": "full", "group_by_length": True}, "full sequences are all of one length"),
        ({"layout": "ful"}, "did you mean 'full'"),
    ],
)
def test_text_settings_without_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)
