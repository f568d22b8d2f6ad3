"""The language model that comes with Paceline: a `GPT` on prepared text."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.models import GPT, GPTConfig
from paceline.models.gpt import default_heads
from paceline.tasks.text import Prepare, TextTask

__all__ = ["Language"]


class Language(TextTask):
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

    can_chunk_loss: ClassVar[bool] = True

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
        super().__init__(data, context, vocabulary, prepare)
        heads = heads if heads is not None else default_heads(width)
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
    def config(self) -> GPTConfig:
        """The model's shape, with the vocabulary of the data; where no data is, with the one given.

        Raises:
            DataError: a vocabulary that is not the data's, or known to neither.
        """
        return GPTConfig(vocabulary=self.vocabulary, **self._shape)

    def build_model(self) -> GPT:
        """A new `GPT`; see there for the initialisation."""
        return GPT(self.config)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Cross entropy in nats, summed over the tokens, and how many those are."""
        tokens_BT, targets_BT = batch
        loss: Tensor = model(tokens_BT, targets_BT, loss_chunks=self.loss_chunks)
        return loss, targets_BT.numel()
