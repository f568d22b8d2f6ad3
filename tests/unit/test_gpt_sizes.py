"""Sizes of a GPT: any number is answered at once, and what no machine can hold is refused by the setting's name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.models import GPTConfig
from paceline.models.gpt import default_heads
from paceline.tasks import Language


def test_default_heads_are_the_most_that_divide_the_width_into_64_even_channels() -> None:
    for width in [*range(1, 1500), 4096, 6144, 8198]:
        slow = [heads for heads in range(1, width // 64 + 1) if width % (2 * heads) == 0]
        assert default_heads(width) == max(slow, default=1)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"width": 10**10}, "Check width and hidden"),
        ({"width": 10**30 + 2}, "Check width and hidden"),
        ({"width": 12 * 10**11, "heads": 12}, "Check width and hidden"),
        ({"width": 256, "hidden": 10**15}, "Check width and hidden"),
        ({"vocabulary": 99_999_999_999_999}, "embedding.weight of shape (99999999999999, 256)"),
        ({"context": 10**14}, "rotary_2TD of shape (2, 100000000000000, 32)"),
        ({"layers": 10**12}, "Check layers, width and hidden"),
        ({"heads": 10**18}, "Use one of heads=1, 2, 4, 8, 16, 32, 64, 128, or another width"),
        ({"width": 2**20, "heads": 2**19, "kv_heads": 3}, "Use one of kv_heads=1, 2, 4, 8"),
        ({"width": 1_000_003}, "Use width=1000004"),
        ({"width": -5}, "width >= 1"),
        ({"width": 0}, "width >= 1"),
    ],
)
def test_nonsense_is_refused_at_once(sizes: dict[str, int], said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Language("nowhere", **sizes)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 0.5
    assert said in str(caught.value)


def test_the_largest_models_there_are_can_be_shaped() -> None:
    shape: dict[str, Any] = {"context": 10_000_000, "width": 65_536, "layers": 1000, "heads": 512, "kv_heads": 512}
    GPTConfig(vocabulary=1_000_000, hidden=4 * 65_536, **shape)  # 67 trillion parameters


@pytest.mark.parametrize(("chunks", "fits"), [(1, True), (64, True), (65, False), (2000, False)])
def test_chunks_of_the_loss_are_no_more_than_a_micro_batch_has_tokens(chunks: int, fits: bool) -> None:
    task = Language("nowhere", vocabulary=100, width=32, context=32)
    if fits:
        task.chunk_loss(chunks, samples=2)
        assert task.loss_chunks == chunks
        return
    with pytest.raises(ConfigError, match=rf"loss_chunks={chunks}, .* 64 tokens \(recipe\.micro_batch=2 x 32\)"):
        task.chunk_loss(chunks, samples=2)


def test_chunks_of_the_loss_have_an_upper_bound_whatever_the_micro_batch() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.loss_chunks=5000, .* need at most 4096"):
        Language("nowhere", vocabulary=100, width=32, context=1024).chunk_loss(5000, samples=32)
