"""A small GPT of the Llama architecture: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Legend of shapes: B samples, T tokens of a sample, N = B T, S tokens that a query may look at (T without a cache), V
vocabulary, C width, H heads, K key-value heads, D size of a head, F hidden width of the feed-forward network.

Sources: Touvron et al. 2023 (Llama, the whole), Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary positions),
Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped-query attention), Press & Wolf 2017 (tied embeddings).

>>> model = GPT(GPTConfig(vocabulary=257, context=16, width=32, layers=2, heads=4, kv_heads=2, hidden=96))
>>> model(torch.zeros(1, 16, dtype=torch.int64)).shape
torch.Size([1, 16, 257])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.models.loss import chunked_cross_entropy

__all__ = ["GPT", "Block", "Cache", "GPTConfig", "default_heads", "flops_per_token", "parameter_count"]

_MOST = 2**46
"""Numbers in a model: 256 TiB in float32, several times what the largest machines hold."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a `GPT`.

    Args:
        vocabulary: different tokens.
        context: most tokens that the model can look back on, itself included.
        width: size of the residual stream.
        layers: transformer blocks.
        heads: query heads; each has ``width / heads`` channels, an even number since rotary positions turn pairs.
        kv_heads: key-value heads; each serves ``heads / kv_heads`` query heads.
        hidden: width of the feed-forward network inside a block.
        dropout: probability, on the embedding, the attention weights and what each branch adds to the residual stream.
        tied: one matrix for embedding and output head.
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the mean square before its root.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    dropout: float = 0.0
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "layers", "heads", "kv_heads", "hidden"):
            value = getattr(self, name)
            if value < 1:
                _refuse(f"{name}={value}", f"{name} >= 1", f"Use a whole number from 1 for {name}")
        self._check_size()
        if self.width % self.heads:
            fits = ", ".join(str(heads) for heads in _head_counts(self.width))
            _refuse(
                f"width={self.width}, heads={self.heads}",
                "width to be a multiple of heads",
                f"Use one of heads={fits}, or another width" if fits else "Use an even width",
            )
        if self.head_size % 2:
            _refuse(
                f"width={self.width}, heads={self.heads}: {self.head_size} channels a head",
                "an even number of channels a head, since rotary positions turn pairs",
                f"Use width={self.width + self.heads}, or another number of heads",
            )
        if self.heads % self.kv_heads:
            fits = ", ".join(map(str, _divisors(self.heads)))
            _refuse(
                f"heads={self.heads}, kv_heads={self.kv_heads}",
                "heads to be a multiple of kv_heads",
                f"Use one of kv_heads={fits}",
            )
        if not 0 <= self.dropout < 1:
            _refuse(f"dropout={self.dropout}", "a probability, 0 <= dropout < 1", "Use dropout=0.1")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                _refuse(f"{name}={value}", f"a finite {name} > 0", f"Leave out {name} for the default")

    def _check_size(self) -> None:
        """Refuses what no machine can hold, by the largest tensor's name: torch would say that a number overflowed."""
        named = {
            "embedding.weight": ((self.vocabulary, self.width), "vocabulary and width"),
            "blocks.0.attention.out.weight": ((self.width, self.width), "width"),
            "blocks.0.feed_forward.up.weight": ((self.hidden, self.width), "width and hidden"),
            "rotary_2TD": ((2, self.context, self.head_size // 2), "context"),
        }
        name, (shape, settings) = max(named.items(), key=lambda item: math.prod(item[1][0]))
        found, count = f"{name} of shape {shape}", math.prod(shape)
        if count <= _MOST:
            count = parameter_count(self)
            found, settings = (
                f"layers={self.layers}, width={self.width}, hidden={self.hidden}",
                "layers, width and hidden",
            )
        if count > _MOST:
            needed = f"at most {_MOST:.1e}: in float32 these are 256 TiB, and no machine holds more"
            _refuse(f"{found}: {count:.1e} numbers", needed, f"Check {settings}")

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.width // self.heads


def _refuse(found: str, needed: str, fix: str) -> None:
    raise ConfigError("cannot shape the model", found=found, needed=needed, fix=fix)


def _head_counts(width: int) -> list[int]:
    return [heads for heads in _divisors(width) if width // heads % 2 == 0]


def _divisors(number: int) -> list[int]:
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return [*low, *(number // factor for factor in reversed(low) if factor**2 != number)]


def default_heads(width: int) -> int:
    """The most heads of at least 64 channels (an even number) that divide the width; one for a narrow model.

    >>> default_heads(768), default_heads(100)
    (12, 1)
    """
    if width < 1 or width**2 > _MOST:
        return 1  # `GPTConfig` refuses that width
    return max((heads for heads in _head_counts(width) if width // heads >= 64), default=1)


class Cache:
    """Keys and values of the tokens seen so far, so that decoding a token costs one token.

    Args:
        config: of the model.
        batch: samples that are decoded side by side.
        like: a tensor whose dtype and device the cache takes: any of the model's parameters.
    """

    def __init__(self, config: GPTConfig, *, batch: int = 1, like: Tensor) -> None:
        self.length = 0
        """Tokens held; the next one stands at this position."""
        shape = (2, batch, config.kv_heads, config.context, config.head_size)
        self.layers = [like.new_zeros(shape) for _ in range(config.layers)]
        """One tensor a block: keys and values, (2, B, K, context, D)."""


class Attention(nn.Module):
    """Causal self-attention: H query heads share K key-value heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor, past: tuple[Tensor, int] | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); ``past``: this block's cache, written at its position."""
        tokens = x_BTC.shape[1]
        qkv_BNTD = self.qkv(x_BTC).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q_BHTD, k_BKTD, v_BKTD = qkv_BNTD.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q_BHTD, k_BKTD = _rotate(q_BHTD, rotary_2TD), _rotate(k_BKTD, rotary_2TD)
        dropout = self.dropout if self.training else 0.0
        grouped = self.heads != self.kv_heads
        if past is None:
            mixed_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, dropout_p=dropout, is_causal=True, enable_gqa=grouped
            )
        else:
            held_2BKSD, start = past
            stop = start + tokens
            held_2BKSD[0, :, :, start:stop] = k_BKTD
            held_2BKSD[1, :, :, start:stop] = v_BKTD
            k_BKSD, v_BKSD = held_2BKSD[:, :, :, :stop].to(q_BHTD.dtype)
            mask_TS = torch.ones(tokens, stop, dtype=torch.bool, device=x_BTC.device).tril(start)
            mixed_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKSD, v_BKSD, attn_mask=mask_TS, dropout_p=dropout, enable_gqa=grouped
            )
        mixed_BTC: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed_BTC


class FeedForward(nn.Module):
    """SwiGLU: one half of the hidden channels gates the other."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        y_BTC: Tensor = self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))
        return y_BTC


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each normed first and added to the residual stream.

    Every block runs the same code on the same shapes and holds no number of its own, so that blocks compiled one by
    one share one compiled graph.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor, past: tuple[Tensor, int] | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rotary_2TD, past))
        y_BTC: Tensor = x_BTC + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTC)))
        return y_BTC


class GPT(nn.Module):
    """A language model; the initial weights follow torch's global generator, so seed it first.

    Initialisation: matrices are normal with standard deviation 1 / sqrt(inputs), which keeps the scale of what passes
    through (LeCun et al. 1998, Efficient BackProp); those that write to the residual stream are divided by
    sqrt(2 layers), since that many branches add up there, and the embedding has 0.02 (both GPT-2, Radford et al. 2019).
    Norms start at one. GPT-2's 0.02 everywhere suits a width of about 2,500; at 128 it learned more slowly.

    Args:
        config: its shape; kept as ``config``.

    Attributes:
        blocks: the layers, each of which can be compiled or recomputed by itself.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("rotary_2TD", _rotary_table(config), persistent=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for module in self.modules():
            if isinstance(module, Block):
                for writer in (module.attention.out, module.feed_forward.down):
                    writer.weight /= math.sqrt(2 * self.config.layers)
        nn.init.normal_(self.embedding.weight, std=0.02)  # last: a tied head is the embedding

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        loss_chunks: int | None = None,
    ) -> Tensor:
        """The logits of each next token, or the loss of given ones.

        Args:
            tokens_BT: int64 token ids, at most ``context`` of them (with those in the cache).
            targets_BT: the token that follows each; then the result is the loss.
            cache: of the tokens before these; these are added to it.
            loss_chunks: with targets: head and loss in so many parts of the tokens, by `chunked_cross_entropy`, so that
                the logits are never there as a whole.

        Returns:
            Without targets: logits (B, T, V). With targets: the sum of the tokens' cross entropies in nats, computed
            in float32 whatever the autocast.

        Raises:
            ConfigError: more tokens than the context holds.
        """
        start = 0 if cache is None else cache.length
        stop = start + tokens_BT.shape[1]
        if stop > self.config.context:
            raise ConfigError(
                "cannot run the model",
                found=f"{stop} tokens",
                needed=f"at most context={self.config.context}",
                fix="Cut the tokens, or build the model with a longer context",
            )
        rotary_2TD = self.get_buffer("rotary_2TD")[:, start:stop]
        x_BTC = self.dropout(self.embedding(tokens_BT))
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rotary_2TD, None if cache is None else (cache.layers[layer], start))
        if cache is not None:
            cache.length = stop
        x_BTC = self.norm(x_BTC)
        if targets_BT is not None and loss_chunks is not None:
            x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
            return chunked_cross_entropy(x_NC, self.head.weight, targets_N, chunks=loss_chunks)
        logits_BTV: Tensor = self.head(x_BTC)
        if targets_BT is None:
            return logits_BTV
        loss: Tensor = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
        return loss


def _rotary_table(config: GPTConfig) -> Tensor:
    """Cosines and sines of each position's angles, (2, context, D / 2); in float64 first, as angles grow large."""
    pairs = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    angles_TD = torch.outer(torch.arange(config.context, dtype=torch.float64), config.rope_theta**-pairs)
    return torch.stack([angles_TD.cos(), angles_TD.sin()]).float()


def _rotate(x_BNTD: Tensor, rotary_2TD: Tensor) -> Tensor:
    """Turns each pair (channel i, channel i + D/2) by its position's angle; float32 inside, then ``x``'s dtype."""
    cos_TD, sin_TD = rotary_2TD
    low_BNTD, high_BNTD = x_BNTD.float().chunk(2, dim=-1)
    turned = (low_BNTD * cos_TD - high_BNTD * sin_TD, high_BNTD * cos_TD + low_BNTD * sin_TD)
    return torch.cat(turned, dim=-1).to(x_BNTD.dtype)


def _matrix_count(config: GPTConfig) -> int:
    """Parameters that a token is multiplied with: all matrices, without the embedding's lookup."""
    attention = config.width * config.head_size * 2 * (config.heads + config.kv_heads)
    feed_forward = 3 * config.width * config.hidden
    return config.layers * (attention + feed_forward) + config.vocabulary * config.width


def parameter_count(config: GPTConfig) -> int:
    """Parameters of ``GPT(config)``; a tied matrix counts once.

    >>> parameter_count(GPTConfig(vocabulary=257, context=256, width=128, layers=4, heads=4, kv_heads=4, hidden=384))
    918912
    """
    embedding = 0 if config.tied else config.vocabulary * config.width
    norms = (2 * config.layers + 1) * config.width
    return _matrix_count(config) + embedding + norms


def flops_per_token(config: GPTConfig) -> int:
    """Floating point operations of one token's forward and backward, in samples of ``context`` tokens.

    ``6 N + 12 layers heads head_size context`` as in PaLM (Chowdhery et al. 2022, appendix B): two operations per
    parameter forward and four backward, and the two products of attention, counted whole (not halved for causality).
    N leaves out the embedding, which is looked up, and the norms. Nothing is added for recompute.
    """
    return 6 * _matrix_count(config) + 12 * config.layers * config.width * config.context
