"""What tasks on prepared text share: the corpus, its windows of tokens, its vocabulary, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.data.prepare import prepare_once
from paceline.data.tokens import Corpus, Tokens
from paceline.errors import DataError
from paceline.tasks.task import Task, require

__all__ = ["Prepare", "TextTask"]


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """How to make the data of a `TextTask` if it is not there yet; the arguments of ``paceline prepare``.

    Args:
        source: files or folders of text, ``.jsonl`` files, or ``python-stdlib``.
        tokenizer: ``bytes``, ``bpe:N`` or the path of a ``tokenizer.json``.
        glob: names of the files taken from a folder.
        field: the field of a JSON line that holds the text.
        errors: what to do with bytes that are no UTF-8.
        valid: fraction of the documents held out.
        limit_bytes: stop after so much text; ``null``: all.
    """

    source: str | list[str]
    tokenizer: str = "bytes"
    glob: str | None = None
    field: str = "text"
    errors: Literal["fail", "replace", "skip"] = "fail"
    valid: float = 0.05
    limit_bytes: int | None = None


class TextTask(Task):
    """Next-token prediction on prepared text; a subclass adds the model and its `loss`.

    A batch is a pair ``(tokens_BT, targets_BT)``, int64. The loss is a sum over tokens, in nats.

    Args:
        data: directory made by ``paceline prepare``, or a headerless ``.bin`` of little-endian uint16 tokens.
        context: tokens of a sample.
        vocabulary: different tokens; ``None``: what the data's index says. A ``.bin`` needs it.
        prepare: how to make ``data`` on first use if it is not there.
    """

    places = ("data", "prepare")

    def __init__(
        self, data: str, context: int = 256, vocabulary: int | None = None, prepare: Prepare | None = None
    ) -> None:
        require(context >= 1, "context", context, "tokens >= 1", "Use context: 256")
        require(
            vocabulary is None or vocabulary >= 1, "vocabulary", vocabulary, "different tokens >= 1", "Leave it out"
        )
        self.data, self.context, self.prepare = Path(data), context, prepare
        self._vocabulary = vocabulary

    @cached_property
    def corpus(self) -> Corpus:
        """The opened data; prepared first if it is not there and ``prepare`` says how.

        Raises:
            DataError: no data, or damaged.
        """
        if self.prepare is not None:
            how = self.prepare
            prepare_once(
                self.data,
                sources=[how.source] if isinstance(how.source, str) else how.source,
                tokenizer=how.tokenizer,
                glob=how.glob,
                field=how.field,
                errors=how.errors,
                valid=how.valid,
                limit_bytes=how.limit_bytes,
            )
        return Corpus.open(self.data)

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are. With the argument given the data need not be there.

        Raises:
            DataError: a vocabulary that is not the data's, or known to neither.
        """
        corpus = self._corpus_if_needed()
        known = None if corpus is None else corpus.vocabulary
        vocabulary = known if self._vocabulary is None else self._vocabulary
        if vocabulary is None:
            raise DataError(
                "cannot tell the vocabulary",
                found=f"{self.data} without an index",
                needed="the number of different tokens",
                fix="Set task.init_args.vocabulary, for example 50257 for tokens of GPT-2",
            )
        if known is not None and known != vocabulary:
            raise DataError(
                "cannot use the vocabulary",
                found=f"vocabulary={vocabulary}, {known} in {self.data}",
                needed="the same number",
                fix="Leave out task.init_args.vocabulary, or prepare the data with another tokenizer",
            )
        return vocabulary

    def _corpus_if_needed(self) -> Corpus | None:
        """`corpus`; ``None`` if it is not there and the vocabulary was given: a model can be built then."""
        return self.corpus if self._vocabulary is None or self.data.exists() else None

    def train_data(self) -> Tokens:
        """Windows of ``context`` tokens with the token that follows each."""
        return self.corpus.train(self.context, self.vocabulary)

    def valid_data(self) -> Tokens | None:
        """The same of the held-out documents; ``None`` for a bare ``.bin``."""
        return self.corpus.valid(self.context, self.vocabulary)

    def derive(self, scores: Mapping[str, Any], split: Literal["train", "valid"]) -> dict[str, float]:
        """``bits_per_byte`` from ``loss``, where the data knows its bytes: comparable between tokenizers."""
        bytes_per_token = self.corpus.bytes_per_token(split)
        if bytes_per_token is None or "loss" not in scores:
            return {}
        return {"bits_per_byte": scores["loss"] / math.log(2) / bytes_per_token}

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of that shape, all 0: the data is left alone."""
        tokens_BT = torch.zeros(samples, self.context, dtype=torch.int64)
        return tokens_BT, tokens_BT

    def tokens_per_sample(self) -> int:
        """The context."""
        return self.context

    def fingerprint(self) -> dict[str, Any]:
        """Content hashes of both splits, and the vocabulary."""
        splits = {str(split): dict(file.fingerprint) for split, file in self.corpus.files.items()}
        return {"vocabulary": self.vocabulary, **splits}
