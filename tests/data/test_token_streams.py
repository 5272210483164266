"""Token ids in mapped files as windows."""

import pickle

import numpy as np
import pytest
import torch

from fasttrain import ConfigError, Data, RunError
from fasttrain.data import TokenStream
from tests.helpers import QUIET, Weight


def written(path, tokens, dtype="uint16"):
    np.asarray(tokens, dtype=dtype).tofile(path)
    return path


def test_windows_cover_a_file_and_targets_are_one_token_later(tmp_path):
    stream = TokenStream(written(tmp_path / "a.bin", range(23)), 5)
    assert len(stream) == 4
    assert [sample["inputs"].tolist() for sample in stream] == [list(range(i, i + 5)) for i in (0, 5, 10, 15)]
    assert all(torch.equal(sample["targets"], sample["inputs"] + 1) for sample in stream)
    assert stream[-1]["inputs"].dtype == torch.int64
    with pytest.raises(IndexError):
        stream[4]
    # Exactly one token more than the windows is enough, one less is not.
    assert [len(TokenStream(written(tmp_path / "b.bin", range(n)), 5)) for n in (6, 10, 11)] == [1, 1, 2]


def test_files_of_other_kinds_are_one_after_the_other_and_no_window_spans_two(tmp_path):
    np.save(tmp_path / "b.npy", np.arange(100, 112, dtype=np.uint32))
    stream = TokenStream([written(tmp_path / "a.bin", range(9)), tmp_path / "b.npy"], 4, stride=3)
    assert [sample["inputs"][0].item() for sample in stream] == [0, 3, 100, 103, 106]
    assert stream.name_of(3) == f"{tmp_path / 'b.npy'}, from token 3"


def test_positions_begin_anew_after_the_end_of_a_document(tmp_path):
    (sample,) = TokenStream(written(tmp_path / "a.bin", [7, 0, 8, 9, 0, 0, 5, 6]), 7, document_end=0)
    assert sample["positions"].tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert sample["documents"].tolist() == [0, 0, 1, 1, 1, 2, 3]


def test_what_is_no_stream_of_tokens_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    short = written(tmp_path / "short.bin", range(5))
    for path, said in [
        (tmp_path / "odd.bin", "has 3 bytes, no whole number of uint16"),
        (tmp_path / "none.bin", "is no file"),
        (tmp_path / "floats.npy", r"holds float64 of shape \(9,\)"),
        (short, "a window takes 6 tokens and .*short.bin holds 5"),
    ]:
        with pytest.raises(ConfigError, match=said):
            TokenStream(path, 5)
    with pytest.raises(RunError, match=r"short.bin: token 4 is 4, and the vocabulary has 4; .*here uint16"):
        TokenStream(short, 4, vocabulary=4)[0]


def test_nothing_of_a_file_travels_to_another_process(tmp_path):
    stream = TokenStream(written(tmp_path / "a.bin", range(60_000)), 5)
    stream[0]
    sent = pickle.dumps(stream)
    assert len(sent) < 2_000
    assert pickle.loads(sent)[7]["inputs"].tolist() == list(range(35, 40))


def test_windows_of_a_file_are_a_tensor_that_a_trainer_takes_whole_batches_of(tmp_path):
    stream = TokenStream(written(tmp_path / "a.bin", range(40)), 5, stride=3)
    windows = stream.windows()
    assert windows.shape == (12, 6)
    assert windows.untyped_storage().nbytes() == 80
    assert [row[:-1].tolist() for row in windows.long()] == [sample["inputs"].tolist() for sample in stream]

    class Windows(Weight):
        def build_data(self):
            return Data(train=(windows,), shuffle=False)

    trainer = Windows(batch_size=4, **QUIET)
    feed = trainer.feed.training(trainer.task, trainer.plan)
    assert torch.equal(torch.cat([next(feed)[0] for _ in range(3)]), windows)
