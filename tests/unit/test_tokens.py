"""Token files: what is read back, and every kind of file that must be refused before training."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data import tokens as tokens_module
from paceline.data.prepare import prepare
from paceline.data.tokens import Corpus, TokenFile, Tokens
from paceline.errors import DataError


def write(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    np.asarray(ids).astype(dtype).tofile(path)
    return path


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    source = tmp_path / "input.txt"
    source.write_text("".join(f"line {i}\n" for i in range(500)), encoding="utf-8")
    prepare([source], tmp_path / "out", valid=0.1)
    return tmp_path / "out"


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    change(index)
    path.write_text(json.dumps(index), encoding="utf-8")


@settings(deadline=None)
@given(count=st.integers(2, 300), context=st.integers(1, 40))
def test_samples_tile_the_file(lasting: Path, count: int, context: int) -> None:
    if count < context + 1:
        return
    ids = np.arange(count) * 7 % 1000
    tokens = Tokens(write(lasting / "tiles.bin", ids), context=context)
    assert len(tokens) == (count - 1) // context
    x_T, y_T = (torch.cat(parts) for parts in zip(*[tokens[i] for i in range(len(tokens))], strict=True))
    covered = len(tokens) * context
    assert x_T.dtype == y_T.dtype == torch.int64
    assert x_T.tolist() == ids[:covered].tolist()
    assert y_T.tolist() == ids[1 : covered + 1].tolist()


def test_torchs_loader_gets_the_same_samples_at_once(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path / "t.bin", np.arange(101)), context=10)
    loader: DataLoader[Any] = DataLoader(tokens, batch_sampler=[[3, 0], [9]])
    (x_BT, y_BT), (last_BT, _) = loader
    assert x_BT[:, 0].tolist() == [30, 0]
    assert y_BT[:, -1].tolist() == [40, 10]
    assert last_BT.tolist() == [list(range(90, 100))]


@pytest.mark.parametrize("index", [-1, 10])
def test_a_sample_that_does_not_exist_is_an_index_error(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        Tokens(write(tmp_path / "t.bin", np.arange(101)), context=10)[index]


def test_a_pickled_dataset_carries_no_data(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path / "t.bin", np.arange(50_000) % 1000), context=10)
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 2000
    assert pickle.loads(pickled)[7][0].tolist() == tokens[7][0].tolist()


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    first = TokenFile.scan(write(tmp_path / "a.bin", np.arange(1000))).fingerprint
    same = TokenFile.scan(write(tmp_path / "b.bin", np.arange(1000))).fingerprint
    other = TokenFile.scan(write(tmp_path / "c.bin", np.arange(1000)[::-1])).fingerprint
    assert first == same != other
    assert json.loads(json.dumps(first)) == first
    assert Tokens(tmp_path / "a.bin", context=5).fingerprint == first


def test_a_large_file_is_looked_at_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(tokens_module, "_BLOCKS", 4)
    monkeypatch.setattr(tokens_module, "_BLOCK_BYTES", 100)
    ids = np.arange(5000) % 300
    ids[-1] = 40_000
    scanned = TokenFile.scan(write(tmp_path / "t.bin", ids))
    assert scanned.highest == 40_000
    assert "xxh3_128 of 4 blocks" in scanned.fingerprint


def test_a_bare_file_is_the_training_split_and_its_neighbour_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", np.arange(100))
    write(tmp_path / "val.bin", np.arange(50))
    for path in (tmp_path / "train.bin", tmp_path):
        corpus = Corpus.open(path)
        valid = corpus.valid(10)
        assert len(corpus.train(10)) == 9
        assert valid is not None and len(valid) == 4
        assert (corpus.vocabulary, corpus.tokenizer, corpus.bytes_per_token("train")) == (None, None, None)
    (tmp_path / "val.bin").rename(tmp_path / "alone.bin")
    assert Corpus.open(tmp_path / "train.bin").valid(10) is None
    write(tmp_path / "valid.bin", np.arange(30))
    assert Corpus.open(tmp_path / "valid.bin").valid(10) is None, "no file is held out from itself"


def test_a_prepared_folder_knows_its_bytes_and_vocabulary(prepared: Path) -> None:
    corpus = Corpus.open(prepared)
    text = "".join(f"line {i}\n" for i in range(500))
    train, valid = corpus.train(8), corpus.valid(8)
    assert valid is not None and corpus.tokenizer is not None
    assert corpus.vocabulary == 257
    assert corpus.bytes_per_token("train") == (train.tokens - 1) / train.tokens
    both = np.concatenate([np.fromfile(prepared / f"{split}.bin", "<u2") for split in ("train", "valid")])
    assert corpus.tokenizer.decode(both.tolist()) == text
    index = json.loads((prepared / "index.json").read_text(encoding="utf-8"))
    assert train.fingerprint["xxh3_128"] == index["splits"]["train"]["xxh3_128"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"abc", r"found 3 bytes, need a multiple of 2"),
        (b"", r"found 0 tokens, context=8, need at least context \+ 1"),
        (bytes(range(16)), r"found 8 tokens, context=8, need at least context \+ 1 tokens. Use a context of at most 7"),
        (np.arange(100, dtype="<u4").tobytes(), r"32-bit tokens, need headerless little-endian uint16"),
        ((np.arange(1000, dtype="<u4") * 900).tobytes(), r"32-bit tokens"),
        (b"\x93NUMPY" + bytes(100), r"found a numpy .npy file"),
        (np.array([20240520, 1, 100] + [0] * 253, dtype="<i4").tobytes(), r"llm.c"),
    ],
    ids=["odd", "empty", "short", "uint32", "uint32-large", "npy", "header"],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        Tokens(path, context=8)
    assert str(path) in str(caught.value)


def test_uint32_files_are_read_when_they_are_said_to_be(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path / "t.bin", np.arange(100) + 70_000, "<u4"), context=8, dtype="uint32")
    assert tokens[0][1].tolist() == list(range(70_001, 70_009))


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", np.arange(301))
    assert len(Tokens(path, context=8, vocabulary=301)) == 37
    with pytest.raises(DataError, match=r"token id 300, vocabulary=300, need a vocabulary of at least 301"):
        Tokens(path, context=8, vocabulary=300)
    with pytest.raises(DataError, match=r"vocabulary=300"):
        Corpus.open(path).train(8, vocabulary=300)


def test_missing_data_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing-here: found no such file or folder"):
        Corpus.open(tmp_path / "nothing-here")
    with pytest.raises(DataError, match=r"a folder without index.json and train.bin"):
        Corpus.open(tmp_path)
    with pytest.raises(DataError, match=r"gone.bin"):
        Tokens(tmp_path / "gone.bin", context=4)


def test_damage_to_a_prepared_folder_is_noticed(prepared: Path) -> None:
    train = prepared / "train.bin"
    whole = train.read_bytes()
    train.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"train.bin: found \d+ bytes, need \d+ bytes, as index.json says"):
        Corpus.open(prepared)
    flipped = bytearray(whole)
    flipped[100] ^= 1
    train.write_bytes(flipped)
    with pytest.raises(DataError, match=r"train.bin: found another content than index.json's hash"):
        Corpus.open(prepared)
    train.unlink()
    with pytest.raises(DataError, match=r"train.bin: found no such file"):
        Corpus.open(prepared)


def test_an_index_that_does_not_fit_is_noticed(prepared: Path) -> None:
    change_index(prepared, lambda index: index.update(vocabulary=100))
    with pytest.raises(DataError, match=r"found token id \d+, vocabulary=100 in index.json"):
        Corpus.open(prepared)
    change_index(prepared, lambda index: index.update(schema="paceline.tokens/99"))
    with pytest.raises(DataError, match=r"schema='paceline.tokens/99', need schema='paceline.tokens/1'"):
        Corpus.open(prepared)
    (prepared / "index.json").write_text('{"schema": ', encoding="utf-8")
    with pytest.raises(DataError, match=r"index.json: found no valid JSON"):
        Corpus.open(prepared)
