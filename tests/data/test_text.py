"""Corpus, vocabulary, sequences and masks of `fasttrain.data.text` and `fasttrain.data.documents`."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fasttrain.data import documents
from fasttrain.data.seeds import mix
from fasttrain.data.text import (
    SPECIAL,
    TextConfig,
    corpus,
    encode,
    full_sequences,
    is_maskable,
    mask_tokens,
    masked_positions,
    train_wordpiece,
    unigram_entropy,
)
from fasttrain.errors import ConfigError, RunError

SMALL = TextConfig(packages=["json", "email", "logging", "asyncio", "unittest"], vocabulary=512, sequence_length=32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def texts():
    return documents.docstrings(SMALL.packages)


# ---- seeds


def test_a_seed_is_the_same_on_every_machine_and_fits_a_signed_integer():
    assert mix(0, "order", 1) == 8024286156118006313
    seeds = {mix(seed, purpose, epoch) for seed in range(10) for purpose in ("order", "batch") for epoch in range(10)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- documents


def test_docstrings_are_found_in_modules_classes_functions_and_calls_that_add_them():
    source = b'''
"""Of the module."""
class A:
    """Of the class."""
    async def f(self):
        """Of the method."""
x = "no docstring"
torch.add_docstr(f, r"""
    By a call.
""".format(**common))
'''
    found = [text for text in documents.docstrings_of(source) if text]
    assert sorted(found) == ["By a call.", "Of the class.", "Of the method.", "Of the module."]


@pytest.mark.parametrize("source", [b"print 'old'", b"\x00", b"{{ template }} = = 1"])
def test_a_source_that_does_not_parse_gives_nothing(source):
    assert list(documents.docstrings_of(source)) == []


def test_documents_are_unique_long_enough_and_in_an_order_that_files_do_not_decide(texts):
    assert len(texts) == len(set(texts)) > 300
    assert min(map(len, texts)) >= documents.SHORTEST
    assert documents.arrange(reversed(texts)) == texts
    assert documents.docstrings(list(reversed(SMALL.packages))) == texts


def test_a_bound_on_the_size_takes_the_first_documents_and_never_more_bytes(texts):
    bounded = documents.docstrings(SMALL.packages, max_bytes=20_000)
    assert bounded == texts[: len(bounded)]
    size = sum(len(text.encode()) for text in bounded)
    assert size <= 20_000 < size + len(texts[len(bounded)].encode())


def test_a_document_never_changes_sides_when_others_come_and_go(texts):
    held_out = {text for text in texts if documents.is_held_out(text, 0.2)}
    assert 0.1 < len(held_out) / len(texts) < 0.3
    assert {text for text in texts[::2] if documents.is_held_out(text, 0.2)} == held_out & set(texts[::2])
    assert {text for text in texts if documents.is_held_out(text, 0.1)} < held_out


def test_an_unknown_package_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"docstrings of 'no_such_package'.*install it, or name others"):
        documents.docstrings(["no_such_package"])


def test_a_folder_without_text_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.txt file is there"):
        documents.text_files(tmp_path)


def test_text_files_are_cut_at_blank_lines(tmp_path):
    (tmp_path / "b.txt").write_text("the third document is long enough to be taken as one\n")
    (tmp_path / "a.txt").write_text(
        "the first document goes\nover two lines of its file\n \nthe second document is the last of this file\n\nshort"
    )
    found = documents.paragraphs(documents.text_files(tmp_path))
    assert sorted(found) == [
        "the first document goes over two lines of its file",
        "the second document is the last of this file",
        "the third document is long enough to be taken as one",
    ]


# ---- vocabulary


def test_the_vocabulary_is_the_same_in_another_process_with_another_number_of_threads(texts, tmp_path):
    (tmp_path / "texts").write_text("\n".join(texts), encoding="utf-8")
    code = (
        "import sys; from fasttrain.data.text import train_wordpiece\n"
        f"texts = open({str(tmp_path / 'texts')!r}, encoding='utf-8').read().split('\\n')\n"
        "sys.stdout.buffer.write(train_wordpiece(texts, 700).to_str().encode())"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert len(made[0]) > 1000
    assert made[0] == made[1] == train_wordpiece(texts, 700).to_str().encode()


def test_the_vocabulary_has_the_asked_size_and_special_tokens_first(texts):
    tokenizer = train_wordpiece(texts, 700)
    assert tokenizer.get_vocab_size() == 700
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(SPECIAL)


def test_text_is_lowered_and_comes_back_and_does_not_spell_special_tokens(texts):
    tokenizer = train_wordpiece(texts, 700)
    ids = next(iter(encode(tokenizer, ["Return a LIST of [MASK] tokens"])))
    assert tokenizer.decode(ids) == "return a list of [ mask ] tokens"
    assert not set(ids) & set(range(5))


# ---- sequences


def test_packing_keeps_every_token_in_order_and_frames_each_sequence():
    documents_ = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    packed = full_sequences(documents_, 6, start=2, separator=3)
    assert packed.tolist() == [[2, 10, 11, 12, 3, 3], [2, 20, 3, 30, 31, 3]]  # 32, 33, 34 fill no sequence
    assert packed.dtype == np.int16


def test_large_ids_are_kept_in_more_bits():
    packed = full_sequences([[40_000] * 3], 5, start=2, separator=3)
    assert packed.tolist() == [[2, 40_000, 40_000, 40_000, 3]]


def test_the_corpus_is_equal_in_every_bit_when_made_again_and_is_read_from_the_cache_after_that(tmp_path, monkeypatch):
    made = []
    for folder in ("one", "two"):
        monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / folder))
        made.append(corpus(SMALL))
    contents = [{file.name: file.read_bytes() for file in each.folder.iterdir()} for each in made]
    assert sorted(contents[0]) == ["facts.json", "held_out.npy", "tokenizer.json", "train.npy"]
    assert contents[0] == contents[1]

    monkeypatch.setattr(documents, "docstrings", lambda *_, **__: pytest.fail("read from the cache"))
    again = corpus(SMALL)
    assert torch.equal(again.train, made[1].train)
    assert again.vocabulary == 512
    assert again.mask_id == 4
    assert again.special_ids == (0, 1, 2, 3, 4)


def test_sequences_are_full_and_framed(cache):
    made = corpus(SMALL)
    for part in (made.train, made.held_out):
        assert part.shape[1] == 32
        assert (part[:, 0] == 2).all()
        assert (part[:, -1] == 3).all()
        assert (part != 0).all()
        assert int(part.max()) < made.vocabulary
    assert len(made.train) > 5 * len(made.held_out) > 50


def test_no_held_out_document_is_in_the_training_part(cache):
    made = corpus(dataclasses.replace(SMALL, sequence_length=64))
    separator = 3

    def pieces(part):  # whole documents: what stands between two separators of one sequence
        rows = [np.array(row[1:-1]) for row in part.tolist()]
        cut = [np.split(row, np.flatnonzero(row == separator))[1:-1] for row in rows]
        return {tuple(piece[1:].tolist()) for row in cut for piece in row}

    train, held_out = pieces(made.train), pieces(made.held_out)
    assert len(train) > 100
    assert len(held_out) > 5
    # Different documents can have equal tokens (letters are lowered, signs dropped), but hardly any do.
    assert len(train & held_out) <= len(held_out) // 10


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": 600},
        {"sequence_length": 33},
        {"held_out": 0.2},
        {"max_bytes": 60_000},
        {"packages": ["json", "email", "logging"]},
    ],
)
def test_another_setting_is_another_cache_entry(cache, change):
    first, second = corpus(SMALL), corpus(dataclasses.replace(SMALL, **change))
    assert first.folder != second.folder
    assert len(list(first.folder.parent.iterdir())) == 2  # nothing half-made stays


def test_masking_more_does_not_make_the_corpus_again(cache):
    assert corpus(SMALL).folder == corpus(dataclasses.replace(SMALL, mask_probability=0.3)).folder


def test_own_text_files_are_read_and_a_changed_file_is_noticed(cache, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    words = [f"word{i} follows word{i + 1} in document number {i} of this folder" for i in range(200)]
    (folder / "all.txt").write_text("\n\n".join(words))
    config = TextConfig(files=str(folder), vocabulary=256, sequence_length=16, held_out=0.2)
    first = corpus(config)
    (folder / "all.txt").write_text("\n\n".join(words[:150]))
    second = corpus(config)
    assert len(second.train) < len(first.train)


def test_what_one_process_writes_into_the_mapped_sequences_stays_its_own(cache):
    first = corpus(SMALL)
    before = first.train.clone()
    first.train.fill_(0)
    assert torch.equal(corpus(SMALL).train, before)


def test_two_processes_that_start_at_once_both_get_the_whole_corpus(cache):
    code = (
        "from fasttrain.data.text import TextConfig, corpus\n"
        f"made = corpus({SMALL!r})\n"
        "print(int(made.train.long().sum()), made.folder)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1]
    assert int(printed[0].split()[0]) == int(corpus(SMALL).train.long().sum())
    assert len(list((cache / "text").iterdir())) == 1


def test_who_finishes_second_takes_what_the_first_one_made(cache, monkeypatch):
    collect, first = documents.docstrings, []

    def slow(*args, **keywords):  # another process starts later and finishes earlier
        monkeypatch.setattr(documents, "docstrings", collect)
        first.append(corpus(SMALL))
        return collect(*args, **keywords)

    monkeypatch.setattr(documents, "docstrings", slow)
    second = corpus(SMALL)
    assert first[0].folder == second.folder
    assert torch.equal(first[0].train, second.train)
    assert list((cache / "text").iterdir()) == [second.folder]


def test_a_damaged_cache_says_which_folder_to_delete(cache):
    folder = corpus(SMALL).folder
    (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:1000])
    with pytest.raises(RunError, match=f"{folder}.*delete that folder"):
        corpus(SMALL)


def test_too_little_text_is_refused_and_leaves_no_cache_entry(cache):
    with pytest.raises(ConfigError, match=r"fill no sequence of 32 tokens; give more text"):
        corpus(dataclasses.replace(SMALL, max_bytes=500))
    assert list((cache / "text").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": 10}, "use 256 or more"),
        ({"sequence_length": 2}, "use 3 or more"),
        ({"held_out": 0.0}, "between 0 and 1"),
        ({"mask_probability": 1.0}, "between 0 and 1"),
    ],
)
def test_settings_without_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        TextConfig(**change)


def test_the_text_modules_load_no_torch_and_no_numpy():
    code = (
        "import sys, fasttrain.data.text, fasttrain.data.documents, fasttrain.data.seeds\n"
        "import fasttrain.models.bert_config\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


# ---- masks

MASKS = {"vocabulary": 1000, "mask_id": 4, "special_ids": (0, 1, 2, 3, 4)}


def test_masks_have_the_shares_of_the_paper_and_never_touch_special_tokens():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 1000, (400, 500), generator=generator)
    tokens[:, ::10] = 2
    inputs, labels = mask_tokens(tokens, **MASKS, generator=generator)
    chosen = labels != -100
    assert not chosen[:, ::10].any()
    assert torch.equal(inputs[:, ::10], tokens[:, ::10])
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])

    count = int(chosen.sum())
    assert count / (tokens.numel() * 0.9) == pytest.approx(0.15, abs=0.004)  # five standard deviations
    hidden, kept = (inputs == 4)[chosen], (inputs == tokens)[chosen]
    assert hidden.double().mean().item() == pytest.approx(0.8 + 0.1 / 1000, abs=0.013)
    assert kept.double().mean().item() == pytest.approx(0.1 + 0.1 / 1000, abs=0.01)
    random_tokens = inputs[chosen][~hidden & ~kept]
    assert random_tokens.double().mean().item() == pytest.approx(499.5, abs=30)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_masks_come_in_any_shape(shape, dtype):
    inputs, labels = mask_tokens(torch.full(shape, 9, dtype=dtype), **MASKS, probability=0.5)
    assert inputs.shape == labels.shape == shape
    assert inputs.dtype == labels.dtype == torch.int64
    assert set(labels.flatten().tolist()) <= {9, -100}


def test_masks_follow_the_given_generator_and_leave_the_global_one_alone():
    tokens = torch.randint(5, 1000, (8, 64))
    before = torch.get_rng_state()
    drawn = [mask_tokens(tokens, **MASKS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][1], drawn[2][1])


def test_masks_follow_the_global_generator_where_none_is_given():
    tokens = torch.randint(5, 1000, (8, 64))
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(mask_tokens(tokens, **MASKS)[1])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_masking_does_not_change_the_tokens_it_was_given():
    tokens = torch.randint(5, 1000, (8, 64))
    before = tokens.clone()
    mask_tokens(tokens, **MASKS, probability=0.9)
    assert torch.equal(tokens, before)


def test_the_positions_of_hidden_tokens_lose_and_repeat_none():
    _, labels = mask_tokens(torch.randint(5, 1000, (50, 128)), **MASKS, generator=torch.Generator().manual_seed(0))
    positions, kept = masked_positions(labels)
    assert positions.shape == kept.shape
    assert positions.shape[1] % 8 == 0
    assert positions.shape[1] < 128
    for row in range(50):
        where = positions[row][kept[row] != -100].tolist()
        assert where == torch.nonzero(labels[row] != -100).flatten().tolist()
    assert int((kept != -100).sum()) == int((labels != -100).sum()) > 500


def test_the_positions_fit_where_all_or_none_are_hidden():
    all_hidden, kept = masked_positions(torch.full((2, 5), 7))
    assert all_hidden.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (kept == 7).all()
    none_hidden, kept = masked_positions(torch.full((2, 20), -100))
    assert none_hidden.shape == (2, 8)
    assert (kept == -100).all()


def test_the_entropy_is_that_of_a_hand_computed_example():
    ids = torch.tensor([[2, 7, 7, 8, 3], [2, 9, 7, 7, 3]])  # of six words 4, 1, 1
    expected = -(4 / 6 * math.log(4 / 6) + 2 * (1 / 6) * math.log(1 / 6))
    assert unigram_entropy(ids, special_ids=(2, 3)) == pytest.approx(expected, abs=1e-12)
    assert unigram_entropy(torch.tensor([7, -100, 7, 7, 8, 9, 7, -100])) == pytest.approx(expected, abs=1e-12)


def test_the_entropy_of_one_token_or_none_is_zero_and_of_equal_shares_their_logarithm():
    assert unigram_entropy(torch.tensor([5, 5, 5])) == 0.0
    assert unigram_entropy(torch.tensor([], dtype=torch.int64)) == 0.0
    assert unigram_entropy(torch.arange(64)) == pytest.approx(math.log(64), abs=1e-12)


def test_the_entropy_is_the_lowest_loss_that_a_guess_without_context_can_have():
    labels = torch.randint(0, 20, (500,), generator=torch.Generator().manual_seed(0)) // 3
    scores = torch.zeros(7, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scores.expand(500, 7), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert closure().item() == pytest.approx(unigram_entropy(labels), abs=1e-5)


def test_special_tokens_are_told_apart():
    assert is_maskable(torch.tensor([[0, 5], [4, 900]]), (0, 1, 2, 3, 4)).tolist() == [[False, True], [False, True]]
