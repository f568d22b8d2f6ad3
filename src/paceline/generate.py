"""Tokens and text from a model, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint import Store
from paceline.errors import CheckpointError, ConfigError, UsageError
from paceline.models import GPT, Cache
from paceline.parsing import parse
from paceline.tasks import Language

__all__ = ["Decoder", "generate", "sample", "stream_text", "window_start"]


class Decoder(Protocol):
    """What turns token ids into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        ...


def window_start(length: int, context: int) -> int:
    """Where the model's window begins in a text of ``length`` tokens.

    [Note: windows] A text longer than the context is seen through a window that stands still while it fills up, then
    jumps by half a context. Sliding by one instead would be unsound with a cache: the keys and values of the tokens
    that stay were computed while the dropped ones could still be seen, and would have to be computed anew for each
    token. So the window depends on the length alone, with and without a cache, and a token costs the same on average.

    >>> [window_start(length, context=8) for length in (1, 8, 9, 12, 13)]
    [0, 0, 4, 4, 8]
    """
    hop = max(1, context // 2)
    return 0 if length <= context else -(-(length - context) // hop) * hop


def generate(
    model: GPT,
    prompt_T: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yields ``tokens`` new token ids that continue ``prompt_T`` (int64, (T,)), in evaluation mode.

    Args:
        model: whose mode and weights are as before after each token.
        prompt_T: ids to go on from; longer than the context: see `window_start`.
        tokens: how many.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw among the likeliest ``top_k`` only.
        seed: of the draws; torch's global generator is not touched.
        use_cache: keep keys and values, instead of computing the whole window for each token.

    Raises:
        ConfigError: at once, for an empty prompt, ids beyond the vocabulary, or settings out of range.
    """
    vocabulary = model.config.vocabulary
    if prompt_T.numel() == 0:
        _refuse("an empty prompt", "at least one token", "Give a prompt, for example 'def '")
    low, high = int(prompt_T.min()), int(prompt_T.max())
    if low < 0 or high >= vocabulary:
        _refuse(
            f"token {high if high >= vocabulary else low} in the prompt",
            f"0 <= token < {vocabulary}, the model's vocabulary",
            "Encode the prompt with the tokenizer that the model was trained with",
        )
    if tokens < 0:
        _refuse(f"tokens={tokens}", "tokens >= 0", "Use tokens=100")
    if not 0 <= temperature < float("inf"):
        _refuse(f"temperature={temperature}", "a finite temperature >= 0", "Use 0 for the likeliest tokens, 1 to draw")
    if top_k is not None and top_k < 1:
        _refuse(f"top_k={top_k}", "top_k >= 1", "Use top_k=50, or leave it out to draw among all tokens")
    return _generate(model, prompt_T.tolist(), tokens, temperature, top_k, seed, use_cache)


def _refuse(found: str, needed: str, fix: str) -> None:
    raise ConfigError("cannot sample", found=found, needed=needed, fix=fix)


def _generate(
    model: GPT, ids: list[int], tokens: int, temperature: float, top_k: int | None, seed: int, use_cache: bool
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    cache: Cache | None = None
    start = -1
    for _ in range(tokens):
        if window_start(len(ids), model.config.context) != start:
            start = window_start(len(ids), model.config.context)
            cache = Cache(model.config, like=model.embedding.weight) if use_cache else None
        unseen = ids[start + (0 if cache is None else cache.length) :]
        ids.append(_choose(_last_logits(model, unseen, cache), temperature, top_k, generator))
        yield ids[-1]


@torch.inference_mode()
def _last_logits(model: GPT, ids: list[int], cache: Cache | None) -> Tensor:
    """The logits (V,) of the token after ``ids``, float32 on the CPU."""
    training = model.training
    model.eval()
    try:
        tokens_BT = torch.tensor([ids], device=model.embedding.weight.device)
        logits_V: Tensor = model(tokens_BT, cache=cache)[0, -1].float().cpu()
    finally:
        model.train(training)
    return logits_V


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        weakest = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < weakest, float("-inf"))
    # From the maximum down, so that a tiny temperature gives -inf and not inf - inf.
    chances_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
    return int(torch.multinomial(chances_V, 1, generator=generator))


def stream_text(decoder: Decoder, ids: Iterator[int]) -> Iterator[str]:
    """Yields the text of ``ids`` as it becomes certain; all pieces together are the text of all ids.

    A character whose bytes are spread over several tokens is held back until it is whole.
    """
    context: list[int] = []  # ids already shown, kept since some tokenizers look back for a leading blank
    pending: list[int] = []
    shown = 0  # characters of the pending ids
    for token in ids:
        pending.append(token)
        text = decoder.decode(context + pending)[len(decoder.decode(context)) :]
        whole = not text.endswith("\ufffd")
        certain = text if whole else text[:-1]
        if len(certain) > shown:
            yield certain[shown:]
        shown = len(certain)
        if whole:
            context, pending, shown = pending, [], 0
    if pending:
        yield decoder.decode(context + pending)[len(decoder.decode(context)) :][shown:]


def sample(
    run_dir: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    notice: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Iterator[str]:
    """Yields text that continues ``prompt``, from the newest good checkpoint of a run; the prompt is not repeated.

    Stops at the end of a document or after ``tokens`` tokens. ``notice`` is called with a line for each newer
    checkpoint that cannot be used and why. The other arguments are those of `generate`. Runs on the CPU.

    Raises:
        ConfigError: no such run, or settings that `generate` refuses.
        CheckpointError: the run has no checkpoint.
        UsageError: the run trains no language model, or its data has no tokenizer.
    """
    settings = run_dir / "config.yaml"
    if not settings.is_file():
        raise ConfigError(
            "cannot sample",
            found=f"no config.yaml in {run_dir}",
            needed="the directory of a run",
            fix="Train one first: paceline train",
        )
    task = parse([str(settings)]).task.make()
    if not isinstance(task, Language):
        raise UsageError(
            "cannot sample",
            found=f"a run of {type(task).__name__}",
            needed="a run of a language model",
            fix="Use paceline.generate.generate with your own model",
        )
    tokenizer = task.corpus.tokenizer
    if tokenizer is None:
        raise UsageError(
            "cannot sample text",
            found=f"{task.data} without a tokenizer",
            needed="data made by paceline prepare",
            fix="Use paceline.generate.generate with token ids",
        )
    loaded = Store(run_dir / "checkpoints").load(None)
    if loaded is None:
        raise CheckpointError(
            "cannot sample",
            found=f"no checkpoint in {run_dir / 'checkpoints'}",
            needed="one that is whole",
            fix="Train the run until it saves one: paceline train --resume",
            cause="usage",
        )
    for line in loaded.passed_over:
        notice(line)
    model = task.build_model()
    model.load_state_dict(loaded.states["model"])
    prompt_T = torch.tensor(tokenizer.encode(prompt), dtype=torch.int64)
    ids = generate(model, prompt_T, tokens, temperature=temperature, top_k=top_k, seed=seed)
    return stream_text(tokenizer, _until(ids, tokenizer.end_of_text))


def _until(ids: Iterator[int], end: int | None) -> Iterator[int]:
    for token in ids:
        if token == end:
            return
        yield token
