"""Tokenizers: text to token ids and back. Each has one token that ends a document.

`ByteTokenizer` needs no training and no file. `FileTokenizer` is a ``tokenizer.json`` of the `tokenizers` library,
someone else's or trained here by `train_bpe`. Which one a corpus uses stands in its ``index.json`` as a *spec*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import DataError

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "bpe_size", "load_tokenizer", "train_bpe"]

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "[EOS]",
    "<|eos|>",
    "[SEP]",
)
"""Names of the token that ends a document, as known tokenizers have them; the first one present counts."""

_PIECE_CHARACTERS = 64 * 1024
_MOST_TOKENS = 2**20
"""A text is encoded in pieces of at most this size, or one long document would need a hundred times its size."""


class Tokenizer(Protocol):
    """Text to ids in ``[0, vocabulary)`` and back; ``end_of_text`` never comes out of `encode`."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def end_of_text(self) -> int: ...
    @property
    def spec(self) -> dict[str, Any]:
        """What ``index.json`` records; `load_tokenizer` reads it."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``: ends of text are left out, bytes that are no UTF-8 come out as U+FFFD."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes themselves; 256 ends a text.

    >>> ByteTokenizer().encode("Hé"), ByteTokenizer().decode([72, 195, 169, 256])
    ([72, 195, 169], 'Hé')
    """

    vocabulary = 257
    end_of_text = 256

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` of the `tokenizers` library.

    Special tokens written out in a text are encoded as plain text, so that no document can end itself; truncation,
    padding and added begin or end tokens of the file are switched off.

    Args:
        json_text: the file's content.
        where: the file's name for errors.

    Raises:
        DataError: the file cannot be read as a tokenizer, or has no token that ends a text.
    """

    def __init__(self, json_text: str, where: str = TOKENIZER_FILE) -> None:
        from tokenizers import Tokenizer as Engine  # not needed, hence not loaded, for bytes

        try:
            self._engine = Engine.from_str(json_text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"cannot use {where} as a tokenizer",
                found=str(error).splitlines()[0],
                needed="a tokenizer.json as the tokenizers library saves it",
                fix="Check the file, or use --tokenizer bytes or bpe:8192",
            ) from error
        self._engine.no_padding()
        self._engine.no_truncation()
        self._engine.encode_special_tokens = True
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        name = next((name for name in _END_OF_TEXT_NAMES if name in vocabulary), None)
        if name is None:
            raise DataError(
                f"cannot use {where} as a tokenizer",
                found="no token that ends a text",
                needed=f"one of {', '.join(_END_OF_TEXT_NAMES)}",
                fix="Add one to the tokenizer as a special token",
            )
        self.json_text = json_text
        self.end_of_text: int = vocabulary[name]
        self.vocabulary: int = max(vocabulary.values()) + 1
        self._end_name = name

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": TOKENIZER_FILE, "end_of_text": self._end_name}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces(text):
            ids += self._engine.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(list(ids), skip_special_tokens=True)


def pieces(text: str, characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """``text`` in pieces of at most ``characters``, each cut behind its last newline where it has one.

    A function of the text alone: the same pieces, hence the same ids, whoever encodes.

    >>> list(pieces("ab\\ncdefg\\n", characters=4))
    ['ab\\n', 'cdef', 'g\\n']
    """
    start = 0
    while start < len(text):
        stop = start + characters
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def bpe_size(name: str) -> int | None:
    """The N of ``bpe:N``, or None for any other name.

    Raises:
        DataError: N is no whole number, leaves no room for the 256 bytes and the end of text, or is beyond all sense.
    """
    kind, colon, size = name.partition(":")
    if kind != "bpe":
        return None
    if not colon or not size.isdecimal() or not 257 <= int(size) <= _MOST_TOKENS:
        raise DataError(
            "cannot train a tokenizer",
            found=f"{name!r}",
            needed=f"bpe:N with a whole number N, 257 to {_MOST_TOKENS}",
            fix="Use bpe:8192",
        )
    return int(size)


def train_bpe(texts: Iterable[str], vocabulary: int) -> FileTokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens (fewer when the texts hold no more merges).

    Byte-level: every text can be encoded, and decoded to itself. Pre-tokenization is GPT-2's.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return FileTokenizer(engine.to_str())


def load_tokenizer(spec: Mapping[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer of a prepared corpus in ``folder`` whose ``index.json`` has this ``spec``."""
    if spec.get("kind") == "bytes":
        return ByteTokenizer()
    return read_tokenizer(folder / TOKENIZER_FILE)


def read_tokenizer(path: Path) -> FileTokenizer:
    """The tokenizer of a ``tokenizer.json`` at ``path``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the tokenizer {path}",
            found=getattr(error, "strerror", None) or "a file that is not UTF-8",
            needed="bytes, bpe:N or the path of a tokenizer.json",
            fix="Check --tokenizer",
        ) from error
    return FileTokenizer(text, where=str(path))
