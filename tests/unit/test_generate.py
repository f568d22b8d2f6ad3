"""Tokens one after the other: the same with and without the cache, windows, draws, and text from a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Snapshot, Store
from paceline.config import Identity
from paceline.data.prepare import prepare
from paceline.errors import CheckpointError, ConfigError, UsageError
from paceline.generate import generate, sample, stream_text, window_start
from paceline.models import GPT, GPTConfig
from paceline.tasks import Language


def small(vocabulary: int = 50, context: int = 12) -> GPT:
    torch.manual_seed(3)
    model = GPT(
        GPTConfig(
            vocabulary=vocabulary, context=context, width=32, layers=2, heads=4, kv_heads=2, hidden=48, dropout=0.5
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from even chances, so that the likeliest token is no near tie
    return model


PROMPT = torch.tensor([1, 2, 3])


@given(st.integers(1, 500), st.integers(1, 40))
def test_a_window_holds_the_newest_tokens_and_at_least_half_a_context(length: int, context: int) -> None:
    seen = length - window_start(length, context)
    assert 1 <= seen <= context
    assert seen >= min(length, context // 2)
    assert 0 <= window_start(length + 1, context) - window_start(length, context) <= max(1, context // 2)


@pytest.mark.parametrize("prompt_length", [1, 3, 12, 31])
def test_greedy_is_the_same_with_and_without_the_cache_past_the_context(prompt_length: int) -> None:
    model = small()
    prompt_T = torch.arange(prompt_length) % 50
    with_cache = list(generate(model, prompt_T, 40, temperature=0, use_cache=True))
    without = list(generate(model, prompt_T, 40, temperature=0, use_cache=False))
    assert with_cache == without
    assert len(with_cache) == 40
    assert len(set(with_cache)) > 3  # or this would say nothing


def test_greedy_takes_the_likeliest_token() -> None:
    model = small()
    (token,) = generate(model, PROMPT, 1, temperature=0)
    assert token == int(model.eval()(PROMPT[None])[0, -1].argmax())


def test_draws_follow_the_seed_and_leave_the_global_generator_and_the_mode_alone() -> None:
    model = small()
    before = torch.get_rng_state()
    first = list(generate(model, PROMPT, 20, seed=1))
    assert first == list(generate(model, PROMPT, 20, seed=1))
    assert first != list(generate(model, PROMPT, 20, seed=2))
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert all(0 <= token < 50 for token in first)


def test_top_k_draws_among_the_likeliest_only() -> None:
    model = small()
    likeliest = set(model.eval()(PROMPT[None])[0, -1].topk(3).indices.tolist())
    drawn = {next(generate(model, PROMPT, 1, temperature=100.0, top_k=3, seed=seed)) for seed in range(60)}
    assert drawn == likeliest
    greedy = list(generate(model, PROMPT, 10, temperature=0))
    assert list(generate(model, PROMPT, 10, temperature=5.0, top_k=1)) == greedy
    assert list(generate(model, PROMPT, 10, temperature=1e-6)) == greedy


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "cannot sample: found an empty prompt, need at least one token"),
        ([1, 50], {}, "found token 50 in the prompt, need 0 <= token < 50"),
        ([-1], {}, "found token -1 in the prompt"),
        ([1], {"temperature": -0.5}, "found temperature=-0.5, need a finite temperature >= 0"),
        ([1], {"temperature": float("nan")}, "found temperature=nan"),
        ([1], {"top_k": 0}, "found top_k=0, need top_k >= 1"),
        ([1], {"tokens": -1}, "found tokens=-1"),
    ],
)
def test_bad_settings_are_refused_at_once(prompt: list[int], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(small(), torch.tensor(prompt, dtype=torch.int64), **{"tokens": 1, **changes})
    assert message in str(caught.value)


class Bytes:
    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@given(st.one_of(st.binary(max_size=60), st.text(max_size=30).map(str.encode)))
def test_streamed_pieces_are_the_whole_text(data: bytes) -> None:
    assert "".join(stream_text(Bytes(), iter(data))) == data.decode(errors="replace")


def test_a_character_arrives_whole_and_as_early_as_it_can() -> None:
    assert list(stream_text(Bytes(), iter("aé€😀b".encode()))) == ["a", "é", "€", "😀", "b"]
    assert list(stream_text(Bytes(), iter(b"a\xf0\x9f"))) == ["a", "\ufffd"]


class LeadingBlanks:
    """Drops the blank before the first word, as decoders of the SentencePiece kind do."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join("word" for _ in ids)


def test_blanks_between_words_survive_streaming() -> None:
    pieces = list(stream_text(LeadingBlanks(), iter(range(3))))
    assert pieces == ["word", " word", " word"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run as `paceline train` leaves it, of a model that was never trained."""
    (tmp_path / "text").mkdir()
    for name in range(30):
        (tmp_path / "text" / f"{name}.txt").write_text(f"document {name} " * 20, encoding="utf-8")
    prepare([str(tmp_path / "text")], tmp_path / "data", glob="*.txt", processes=1)
    init_args = {"data": str(tmp_path / "data"), "width": 16, "layers": 1, "heads": 2, "context": 16}
    directory = tmp_path / "run"
    directory.mkdir()
    config = {
        "task": {"class_path": "paceline.tasks.Language", "init_args": init_args},
        "recipe": {"steps": 1},
        "execution": {},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    torch.manual_seed(0)
    model = Language(**init_args).build_model()  # type: ignore[arg-type]
    for step in (1, 2):
        snapshot = Snapshot.take(step=step, states={"model": model.state_dict()}, position={}, metrics={})
        Store(directory / "checkpoints").save(snapshot, Identity.of({}))
    return directory


def test_text_from_a_run(run_dir: Path) -> None:
    text = "".join(sample(run_dir, "docu", 30, seed=1))
    assert text
    assert text == "".join(sample(run_dir, "docu", 30, seed=1))
    assert text != "".join(sample(run_dir, "docu", 30, seed=2))
    assert not text.startswith("docu")


def test_a_damaged_checkpoint_is_passed_over_and_named(run_dir: Path) -> None:
    newest = max((run_dir / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"")
    lines: list[str] = []
    assert "".join(sample(run_dir, "docu", 5, notice=lines.append))
    assert len(lines) == 1
    assert newest.name in lines[0]


def test_what_a_run_may_lack(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found no config.yaml in .*nowhere, need the directory of a run"):
        sample(tmp_path / "nowhere", "a", 1)
    with pytest.raises(ConfigError, match="an empty prompt"):
        sample(run_dir, "", 1)
    (run_dir / "checkpoints").rename(run_dir / "moved")
    with pytest.raises(CheckpointError, match="found no checkpoint in") as caught:
        sample(run_dir, "a", 1)
    assert caught.value.exit_code == 2


def test_a_bare_bin_has_no_text(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.bin").write_bytes(bytes(2000))
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    config["task"]["init_args"] |= {"data": str(tmp_path / "bare.bin"), "vocabulary": 257}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(UsageError, match=r"found .*bare.bin without a tokenizer"):
        sample(run_dir, "a", 1)


def test_the_end_of_a_document_ends_the_text(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*b"abc", 256, *b"def"]
    monkeypatch.setattr("paceline.generate.generate", lambda *args, **rest: iter(ids))
    assert "".join(sample(run_dir, "docu", 7)) == "abc"


def test_pieces_come_one_by_one(run_dir: Path) -> None:
    pieces = list(sample(run_dir, "docu", 12, seed=3))
    assert len(pieces) > 3
    assert all(a or b for a, b in pairwise(pieces))
