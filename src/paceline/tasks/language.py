"""The language model: a `GPT` on a corpus of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from paceline.data.prepare import prepare_once
from paceline.data.tokens import Corpus, Tokens
from paceline.errors import DataError
from paceline.models import GPT, GPTConfig
from paceline.tasks.task import Task

__all__ = ["Language", "Prepare"]


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """How to make the data of a `Language` task if it is not there yet; the arguments of ``paceline prepare``.

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


class Language(Task):
    """Next-token prediction with a `GPT`.

    Args:
        data: directory made by ``paceline prepare``, or a headerless ``.bin`` of little-endian uint16 tokens.
        width: size of the residual stream.
        layers: transformer blocks.
        heads: query heads; ``null``: about 64 channels each.
        kv_heads: key-value heads; ``null``: as many as query heads.
        hidden: width of the feed-forward network; ``null``: 8/3 of the width, rounded up to a multiple of 64.
        context: tokens of a sample.
        dropout: probability, everywhere in the model.
        tied: one matrix for embedding and output head.
        vocabulary: different tokens; ``null``: what the data's index says. A ``.bin`` needs it.
        prepare: how to make ``data`` on first use if it is not there.
    """

    places = ("data", "prepare")

    def __init__(
        self,
        data: str,
        width: int = 256,
        layers: int = 4,
        heads: int | None = None,
        kv_heads: int | None = None,
        hidden: int | None = None,
        context: int = 256,
        dropout: float = 0.0,
        tied: bool = False,
        vocabulary: int | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        heads = heads if heads is not None else _default_heads(width)
        self.data = Path(data)
        self.context = context
        self.prepare = prepare
        self._vocabulary = vocabulary
        self._shape: dict[str, Any] = {
            "context": context,
            "width": width,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads if kv_heads is not None else heads,
            "hidden": hidden if hidden is not None else -(-8 * width // (3 * 64)) * 64,
            "dropout": dropout,
            "tied": tied,
        }
        GPTConfig(vocabulary=1 if vocabulary is None else vocabulary, **self._shape)  # checks it without the data

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

    @cached_property
    def config(self) -> GPTConfig:
        """The model's shape, with the vocabulary of the data.

        Raises:
            DataError: a vocabulary that is not the data's, or known to neither.
        """
        known = self.corpus.vocabulary
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
        return GPTConfig(vocabulary=vocabulary, **self._shape)

    def build_model(self) -> GPT:
        """A new `GPT`; see there for the initialisation."""
        return GPT(self.config)

    def train_data(self) -> Tokens:
        """Windows of ``context`` tokens with the token that follows each."""
        return self.corpus.train(self.context, self.config.vocabulary)

    def valid_data(self) -> Tokens | None:
        """The same of the held-out documents; ``None`` for a bare ``.bin``."""
        return self.corpus.valid(self.context, self.config.vocabulary)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Cross entropy in nats, summed over the tokens, and how many those are."""
        tokens_BT, targets_BT = batch
        loss: Tensor = model(tokens_BT, targets_BT)
        return loss, targets_BT.numel()

    def derive(self, scores: Mapping[str, float], split: Literal["train", "valid"]) -> dict[str, float]:
        """``bits_per_byte`` from ``loss``, where the data knows its bytes: comparable between tokenizers."""
        bytes_per_token = self.corpus.bytes_per_token(split)
        if bytes_per_token is None or "loss" not in scores:
            return {}
        return {"bits_per_byte": scores["loss"] / math.log(2) / bytes_per_token}

    def tokens_per_sample(self) -> int:
        """The context."""
        return self.context

    def fingerprint(self) -> dict[str, Any]:
        """Content hashes of both splits, and the vocabulary."""
        splits = {str(split): dict(file.fingerprint) for split, file in self.corpus.files.items()}
        return {"vocabulary": self.config.vocabulary, **splits}


def _default_heads(width: int) -> int:
    """The most heads of at least 64 channels (an even number) that divide the width; one for a narrow model."""
    fits = [heads for heads in range(1, width // 64 + 1) if width % (2 * heads) == 0]
    return max(fits, default=1)
