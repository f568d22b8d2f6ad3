"""Token files as datasets: memory-mapped, checked before training, read in windows.

Shapes: T is the context, B the samples asked for at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.documents import Split
from paceline.data.index import PREPARE_AGAIN, read_index
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import DataError

__all__ = ["Corpus", "TokenFile", "Tokens"]

Dtype = Literal["uint16", "uint32"]

_WHOLE_BYTES = 2 * 2**30
"""Files up to this size are read whole when opened (about a second); of larger ones `_BLOCKS` evenly spaced blocks."""
_BLOCKS = 256
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A headerless file of little-endian token ids whose content was looked at.

    Attributes:
        tokens: how many there are.
        highest: the highest token id seen, -1 in an empty file.
        fingerprint: content hash, tokens and dtype as JSON, for a run's identity. A file above 2 GiB is hashed in
            evenly spaced blocks, and the fingerprint says so, unless an ``index.json`` tells its whole hash.
        documents, text_bytes: what ``index.json`` counted, None without one.
    """

    path: Path
    dtype: Dtype
    tokens: int
    highest: int
    fingerprint: Mapping[str, Any]
    documents: int | None = None
    text_bytes: int | None = None

    @classmethod
    def scan(cls, path: Path, dtype: Dtype = "uint16", *, foreign: bool = True) -> TokenFile:
        """Reads ``path`` once in bounded memory.

        Args:
            foreign: no ``index.json`` vouches for the format: also look for signs of another one.

        Raises:
            DataError: missing, or of a length that is no whole number of tokens; if ``foreign`` also with a header, or
                plainly of another dtype (32-bit ids read as 16-bit ones).
        """
        item = np.dtype(dtype).itemsize
        try:
            size = path.stat().st_size
            whole = size <= _WHOLE_BYTES
            _check_length(path, size, dtype)
            content, highest, highest_odd = xxhash.xxh3_128(), -1, 0
            with path.open("rb") as file:
                count = -(-size // _BLOCK_BYTES) if whole else _BLOCKS
                for i in range(count):
                    start = i * _BLOCK_BYTES if whole else (size - _BLOCK_BYTES) * i // (_BLOCKS - 1) // 4 * 4
                    file.seek(start)
                    block = file.read(_BLOCK_BYTES)
                    if i == 0 and foreign:
                        _check_header(path, block)
                    content.update(block)
                    ids = np.frombuffer(block, dtype=np.dtype(dtype).newbyteorder("<"))
                    highest = max(highest, int(ids.max()))
                    highest_odd = max(highest_odd, int(ids[1::2].max(initial=0)))
        except OSError as error:
            raise DataError(
                f"cannot read tokens from {path}", found=error.strerror, needed="a token file", fix="Check the path"
            ) from error
        # the upper halves of 32-bit ids: all zero, or no more than a vocabulary of a million would need
        if foreign and item == 2 and size >= 64 and highest > (255 if highest_odd else 0) and highest_odd < 16:
            raise DataError(
                f"cannot read {path} as {dtype}",
                found="every second token 0 or nearly so, as in a file of 32-bit tokens",
                needed="headerless little-endian uint16",
                fix=f"Convert it, or: {PREPARE_AGAIN}",
            )
        method = "xxh3_128" if whole else f"xxh3_128 of {_BLOCKS} blocks"
        fingerprint = {method: content.hexdigest(), "tokens": size // item, "dtype": dtype}
        return cls(path=path, dtype=dtype, tokens=size // item, highest=highest, fingerprint=fingerprint)


def _check_length(path: Path, size: int, dtype: Dtype) -> None:
    item = np.dtype(dtype).itemsize
    if size % item:
        raise DataError(
            f"cannot read {path} as {dtype}",
            found=f"{size} bytes",
            needed=f"a multiple of {item}, the bytes of one token",
            fix=f"The file was cut off or is no token file. {PREPARE_AGAIN}",
        )


def _check_header(path: Path, start: bytes) -> None:
    kinds = {b"\x93NUMPY": "a numpy .npy file", (20240520).to_bytes(4, "little"): "the header of llm.c's data files"}
    for magic, kind in kinds.items():
        if start.startswith(magic):
            raise DataError(
                f"cannot read tokens from {path}",
                found=kind,
                needed="headerless little-endian uint16",
                fix="Write the bare ids: ids.astype('<u2').tofile('train.bin')",
            )


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context + 1`` tokens at a stride of ``context``: every token but the first is predicted once.

    Sample i is ``(x_T, y_T)``, int64: tokens ``[i * context, (i + 1) * context)`` and the same one further on.

    Args:
        source: a path of a headerless token file, or one already scanned.
        context: T, tokens of a sample.
        vocabulary: of the model that will read them; None checks no ids.
        dtype: of the file when ``source`` is a path.

    Raises:
        DataError: the file cannot be used, holds an id beyond ``vocabulary`` or fewer than ``context + 1`` tokens.
    """

    keyed = False
    """Nothing random in a sample: the loader need not seed for it."""

    def __init__(
        self, source: Path | TokenFile, *, context: int, vocabulary: int | None = None, dtype: Dtype = "uint16"
    ) -> None:
        self.file = source if isinstance(source, TokenFile) else TokenFile.scan(Path(source), dtype)
        self.context = context
        self.tokens = self.file.tokens
        if vocabulary is not None and self.file.highest >= vocabulary:
            raise DataError(
                f"cannot train on {self.file.path}",
                found=f"token id {self.file.highest}, vocabulary={vocabulary}",
                needed=f"a vocabulary of at least {self.file.highest + 1}",
                fix="Set the model's vocabulary to the tokenizer's",
            )
        if self.tokens < context + 1:
            raise DataError(
                f"cannot cut {self.file.path} into samples",
                found=f"{self.tokens} tokens, context={context}",
                needed="at least context + 1 tokens",
                fix=f"Use a context of at most {self.tokens - 1} or more data" if self.tokens > 1 else "Use more data",
            )
        self._ids = self._map()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Content hash, tokens and dtype: what a resumed run must find again."""
        return dict(self.file.fingerprint)

    def __len__(self) -> int:
        return (self.tokens - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The samples at ``indices`` in one gather; torch's fetcher calls this when it is there."""
        starts_B = np.asarray(indices, dtype=np.int64) * self.context
        if starts_B.size and not (starts_B.min() >= 0 and starts_B.max() <= (len(self) - 1) * self.context):
            raise IndexError(f"sample indices must lie in [0, {len(self)})")
        window_BT1 = self._ids[starts_B[:, None] + np.arange(self.context + 1)]
        windows = torch.from_numpy(window_BT1.astype(np.int64))
        return [(window[:-1], window[1:]) for window in windows]

    def _map(self) -> NDArray[Any]:
        mapped = np.memmap(self.file.path, dtype=np.dtype(self.file.dtype).newbyteorder("<"), mode="r")
        return mapped.view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}  # a loader process maps the file itself: a pickled map is a full copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ids = self._map()


class Corpus:
    """A prepared directory, or token files as nanoGPT-style tools write them.

    Without an ``index.json``, ``path`` is a headerless uint16 ``.bin`` (the training split; a ``val.bin`` or
    ``valid.bin`` beside it is the held-out one) or a folder with ``train.bin``.

    Attributes:
        files: the `TokenFile` of each split that has tokens.
        vocabulary: of the tokenizer, None where no ``index.json`` tells.
        tokenizer: None likewise.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[Split, TokenFile],
        vocabulary: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.path, self.files, self.vocabulary, self.tokenizer = path, files, vocabulary, tokenizer

    @classmethod
    def open(cls, path: Path | str) -> Corpus:
        """Opens and checks: sizes always, hashes and ids of files up to 2 GiB, evenly spaced blocks of larger ones.

        Raises:
            DataError: nothing there, or not what ``index.json`` says: the file is named.
        """
        path = Path(path)
        if (path / "index.json").is_file():
            return cls._prepared(path)
        train = path / "train.bin" if path.is_dir() else path
        if not train.is_file():
            raise DataError(
                f"cannot open the data {path}",
                found="a folder without index.json and train.bin" if path.is_dir() else "no such file or folder",
                needed="a folder that `paceline prepare` wrote, or a headerless uint16 .bin",
                fix=f"Check the path, or write it: `paceline prepare SRC --out {path}`",
            )
        files: dict[Split, TokenFile] = {"train": TokenFile.scan(train)}
        held_out = [train.with_name(name) for name in ("val.bin", "valid.bin")]
        for beside in held_out:
            if train not in held_out and beside.is_file():
                files["valid"] = TokenFile.scan(beside)
                break
        return cls(path, files)

    @classmethod
    def _prepared(cls, path: Path) -> Corpus:
        index = read_index(path)
        vocabulary, dtype = index["vocabulary"], index["dtype"]
        files: dict[Split, TokenFile] = {}
        names: tuple[Split, Split] = ("train", "valid")
        for name in names:
            said = index["splits"][name]
            if said["tokens"] == 0:
                continue
            file = path / said["file"]
            _check_size(file, said["tokens"], dtype)
            seen = TokenFile.scan(file, dtype, foreign=False)
            if seen.fingerprint.get("xxh3_128", said["xxh3_128"]) != said["xxh3_128"]:
                raise DataError(
                    f"cannot trust {file}",
                    found="another content than index.json's hash",
                    needed="the file as it was prepared",
                    fix=f"It was damaged or changed. {PREPARE_AGAIN}",
                )
            if seen.highest >= vocabulary:
                raise DataError(
                    f"cannot use {file}",
                    found=f"token id {seen.highest}, vocabulary={vocabulary} in index.json",
                    needed="ids below the vocabulary",
                    fix=PREPARE_AGAIN,
                )
            files[name] = TokenFile(
                path=file,
                dtype=dtype,
                tokens=seen.tokens,
                highest=seen.highest,
                fingerprint={"xxh3_128": said["xxh3_128"], "tokens": seen.tokens, "dtype": dtype},
                documents=said["documents"],
                text_bytes=said["bytes"],
            )
        return cls(path, files, vocabulary, load_tokenizer(index["tokenizer"], path))

    def train(self, context: int, vocabulary: int | None = None) -> Tokens:
        """The training split in samples of ``context`` tokens, for a model of ``vocabulary`` (default: our own)."""
        tokens = self._tokens("train", context, vocabulary)
        if tokens is None:
            raise DataError(f"cannot train on {self.path}", found="an empty training split", fix="Prepare more text")
        return tokens

    def valid(self, context: int, vocabulary: int | None = None) -> Tokens | None:
        """The held-out split, None where there is none. One shorter than a sample is an error, as in `train`."""
        return self._tokens("valid", context, vocabulary)

    def bytes_per_token(self, split: Split) -> float | None:
        """Bytes of text per token, ends of text counted as tokens; None where the bytes are not known."""
        file = self.files.get(split)
        return file.text_bytes / file.tokens if file and file.text_bytes is not None else None

    def _tokens(self, split: Split, context: int, vocabulary: int | None) -> Tokens | None:
        file = self.files.get(split)
        return Tokens(file, context=context, vocabulary=vocabulary or self.vocabulary) if file else None


def _check_size(file: Path, tokens: int, dtype: Dtype) -> None:
    size = file.stat().st_size if file.is_file() else None
    needed = tokens * np.dtype(dtype).itemsize
    if size != needed:
        raise DataError(
            f"cannot trust {file}",
            found="no such file" if size is None else f"{size} bytes",
            needed=f"{needed} bytes, as index.json says",
            fix=f"It was cut off, changed or moved. {PREPARE_AGAIN}",
        )
