"""Tasks on text: cheap to make, lazy about data, honest about vocabularies and bytes; models of transformers."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from paceline.data.prepare import prepare
from paceline.errors import ConfigError, DataError
from paceline.tasks import CausalLM, Language, Prepare, Task, TextTask

SMALL: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "context": 8}


@pytest.fixture
def bare_bin(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    (np.arange(500, dtype="<u2") % 40).tofile(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in range(40):
        (folder / f"{name}.txt").write_text(f"Größe {name} " * 15, encoding="utf-8")
    return folder


def test_making_one_touches_no_data_but_checks_its_arguments() -> None:
    Language("does/not/exist", prepare=Prepare(source="neither/does/this"))
    with pytest.raises(ConfigError, match=r"width=256, heads=7, need width to be a multiple of heads"):
        Language("x", heads=7)
    with pytest.raises(ConfigError, match="found context=0"):
        Language("x", context=0)
    with pytest.raises(ConfigError, match="found vocabulary=0"):
        Language("x", vocabulary=0)


@pytest.mark.parametrize(("width", "heads", "hidden"), [(256, 4, 704), (128, 2, 384), (192, 3, 512), (32, 1, 128)])
def test_shape_left_open_follows_the_width(bare_bin: Path, width: int, heads: int, hidden: int) -> None:
    config = Language(str(bare_bin), width=width, vocabulary=40).config
    assert (config.heads, config.kv_heads, config.hidden) == (heads, heads, hidden)


@pytest.mark.parametrize("width", [2, 66, 100, 130, 192, 250, 768])
def test_heads_left_open_fit_any_even_width(bare_bin: Path, width: int) -> None:
    config = Language(str(bare_bin), width=width, vocabulary=40).config
    assert width % config.heads == 0
    assert config.head_size % 2 == 0


def test_from_a_bare_bin_to_a_loss(bare_bin: Path) -> None:
    task = Language(str(bare_bin), vocabulary=40, **SMALL)
    model = task.build_model()
    data = task.train_data()
    assert len(data) == 499 // 8
    batch = task.collate([data[0], data[1], data[2]])
    loss, weight = task.loss(model, batch)
    assert loss.shape == ()
    assert weight == 24
    assert loss.item() / weight == pytest.approx(math.log(40), abs=1.0)
    assert task.evaluate(model, batch)["loss"] == (loss, weight)
    assert task.valid_data() is None
    assert task.derive({"loss": 1.0}, "train") == {}
    assert task.tokens_per_sample() == 8


def test_collating_is_what_torch_does(bare_bin: Path) -> None:
    task = Language(str(bare_bin), vocabulary=40, **SMALL)
    ours_BT, _ = task.collate([task.train_data()[index] for index in range(4)])
    torchs_BT, _ = next(iter(DataLoader(task.train_data(), batch_size=4)))
    assert torch.equal(ours_BT, torchs_BT)


def test_a_vocabulary_must_be_known_and_hold_every_token(bare_bin: Path) -> None:
    with pytest.raises(DataError, match=r"cannot tell the vocabulary.*Set task.init_args.vocabulary"):
        Language(str(bare_bin), **SMALL).build_model()
    with pytest.raises(DataError, match="token id 39"):
        Language(str(bare_bin), vocabulary=39, **SMALL).train_data()


def test_data_must_be_there_and_longer_than_the_context(tmp_path: Path, bare_bin: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Language(str(tmp_path / "nowhere"), vocabulary=40).train_data()
    with pytest.raises(DataError, match="context=500"):
        Language(str(bare_bin), vocabulary=40, **{**SMALL, "context": 500}).train_data()


def test_prepared_data_brings_its_vocabulary_and_its_bytes(text: Path, tmp_path: Path) -> None:
    prepare([str(text)], tmp_path / "data", glob="*.txt", valid=0.3, processes=1)
    task = Language(str(tmp_path / "data"), **SMALL)
    assert task.config.vocabulary == 257
    assert task.valid_data() is not None
    bytes_per_token = task.corpus.bytes_per_token("valid")
    assert bytes_per_token is not None
    assert 0.9 < bytes_per_token < 1  # a document's end is a token without bytes
    bits = task.derive({"loss": math.log(2)}, "valid")
    assert bits == {"bits_per_byte": pytest.approx(1 / bytes_per_token)}
    with pytest.raises(DataError, match=r"found vocabulary=300, 257 in"):
        Language(str(tmp_path / "data"), vocabulary=300, **SMALL).build_model()


def test_data_is_prepared_on_first_use_and_once(text: Path, tmp_path: Path) -> None:
    how = Prepare(source=[str(text)], glob="*.txt", valid=0.3)
    task = Language(str(tmp_path / "made" / "data"), prepare=how, **SMALL)
    assert not (tmp_path / "made").exists()
    samples = len(task.train_data())
    for file in text.iterdir():
        file.unlink()
    again = Language(str(tmp_path / "made" / "data"), prepare=how, **SMALL)
    assert len(again.train_data()) == samples
    assert again.fingerprint() == task.fingerprint()


def test_the_fingerprint_is_json_and_follows_the_content(bare_bin: Path) -> None:
    before = Language(str(bare_bin), vocabulary=40, **SMALL).fingerprint()
    assert json.loads(json.dumps(before)) == before
    ids = np.fromfile(bare_bin, dtype="<u2")
    ids[-1] = 0
    ids.tofile(bare_bin)
    assert Language(str(bare_bin), vocabulary=40, **SMALL).fingerprint() != before


# Models of transformers.

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}


def causal(data: Path, model_type: str = "gpt2", **config: Any) -> CausalLM:
    return CausalLM(str(data), model_type, ARCHITECTURES.get(model_type, {}) | config, context=8, vocabulary=40)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_model_of_transformers_learns_from_the_same_data(
    bare_bin: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something wants to be downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    task, ours = causal(bare_bin, model_type), Language(str(bare_bin), vocabulary=40, **SMALL)
    model = task.build_model()
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = task.collate([task.train_data()[index] for index in range(3)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, weight = task.loss(model, batch)
    assert (loss.dtype, loss.shape, weight) == (torch.float32, (), 24)
    assert loss.item() / weight == pytest.approx(math.log(40), abs=0.3)
    loss.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert (task.fingerprint(), task.tokens_per_sample(), task.places) == (ours.fingerprint(), 8, ours.places)


def test_the_loss_is_that_of_the_next_token(bare_bin: Path) -> None:
    task = causal(bare_bin, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = task.build_model()
    tokens_BT, targets_BT = task.collate([task.train_data()[index] for index in range(2)])
    assert torch.equal(tokens_BT[:, 1:], targets_BT[:, :-1])
    theirs = model(input_ids=tokens_BT, labels=tokens_BT).loss  # a mean; of all targets but the last of each sample
    logits_BTV = model(input_ids=tokens_BT).logits
    last = nn.functional.cross_entropy(logits_BTV[:, -1], targets_BT[:, -1], reduction="sum")
    loss, _ = task.loss(model, (tokens_BT, targets_BT))
    assert loss.item() == pytest.approx(theirs.item() * 14 + last.item(), rel=1e-5)


def test_the_vocabulary_and_the_longest_sequence_follow_the_data(text: Path, tmp_path: Path) -> None:
    prepare([str(text)], tmp_path / "data", glob="*.txt", valid=0.3, processes=1)
    config: Any = CausalLM(str(tmp_path / "data"), config=ARCHITECTURES["gpt2"], context=16).build_model().config
    assert (config.vocab_size, config.n_positions, config.eos_token_id) == (257, 16, 256)
    longer = CausalLM(
        str(tmp_path / "data"), config=ARCHITECTURES["gpt2"] | {"max_position_embeddings": 64}, context=16
    )
    assert cast(Any, longer.build_model().config).n_positions == 64
    with pytest.raises(DataError, match=r"found vocabulary=40, 257 in"):
        causal(tmp_path / "data").build_model()


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("lama", {}, r"found model_type='lama', need one of the \d+ causal .* Did you mean 'llama'\?"),
        ("gpt2", {"n_layers": 2}, r"config.n_layers: found an unknown name, .* Did you mean 'n_layer'\?"),
        ("gpt2", {"n_head": 3}, "cannot build the gpt2 model: found ValueError: .*divisible"),
        ("gpt2", {"n_embd": "16"}, "cannot build the gpt2 model: found .*n_embd"),
        ("gpt2", {"n_positions": 4}, "found n_positions=4, context=8, need n_positions >= context"),
        ("gpt2", {"vocab_size": 64}, r"found vocab_size=64, .* task.init_args.vocabulary"),
        ("gpt2", {"dtype": "bfloat16"}, r"found dtype='bfloat16', .* recipe.precision: bf16"),
        ("gemma3", {}, "without vocab_size, made of several, .* gemma3_text"),
        ("bert", {"is_decoder": False}, "found outputs that depend on tokens to come"),
    ],
)
def test_a_model_that_cannot_be_built_is_told_when_it_is_to_be_built(
    bare_bin: Path, model_type: str, config: dict[str, Any], message: str
) -> None:
    task = causal(bare_bin, model_type, **config)
    with pytest.raises(ConfigError, match=message):
        task.build_model()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_transformers_learns_the_same_with_its_loss_in_chunks(
    bare_bin: Path, model_type: str, autocast: bool
) -> None:
    task = causal(bare_bin, model_type)
    task.chunk_loss(5)
    model = task.build_model().eval()  # without dropout
    assert cast(Any, model).get_output_embeddings().bias is None or model_type == "bert"
    batch = task.collate([task.train_data()[index] for index in range(3)])

    def run(chunks: int | None) -> torch.Tensor:
        task.chunk_loss(chunks)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss, weight = task.loss(model, batch)
        assert weight == 24
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat([loss.detach().view(1), *(part.flatten() for part in gradients if part is not None)])

    chunked, plain = run(5), run(None)
    for part in (slice(1), slice(1, None)):
        assert float((chunked[part] - plain[part]).norm() / plain[part].norm()) < (2e-2 if autocast else 1e-5)
    logits_BTV = model(input_ids=batch[0]).logits
    assert logits_BTV.shape == (3, 8, 40)  # nothing of it is left in the model
    with torch.no_grad():
        assert task.evaluate(model, batch)["loss"] == task.loss(model, batch)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("gemma2", {"head_dim": 8, "num_key_value_heads": 1}), ("granite", {"logits_scaling": 2.0})],
)
def test_logits_that_are_changed_afterwards_are_not_split(
    bare_bin: Path, model_type: str, config: dict[str, Any]
) -> None:
    task = causal(bare_bin, model_type, **ARCHITECTURES["llama"], **config)
    task.build_model()
    task.chunk_loss(2)
    with pytest.raises(ConfigError, match=f"split the loss of the {model_type} model: found logits that are changed"):
        task.build_model()


def test_a_head_that_is_not_linear_is_not_split(bare_bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = causal(bare_bin)
    task.chunk_loss(2)
    monkeypatch.setattr(type(task.build_model()), "get_output_embeddings", lambda _: None)
    with pytest.raises(ConfigError, match="found an output head of class NoneType, need logits as one linear"):
        task.build_model()


def test_a_model_of_transformers_is_built_on_shapes_alone_and_without_data() -> None:
    task = CausalLM("does/not/exist", config={"n_layer": 2}, context=1024, vocabulary=50257)
    task.chunk_loss(16)
    with FakeTensorMode():
        model = task.build_model()
        loss, weight = task.loss(model, task.example(64))
        loss.backward()
    assert weight == 64 * 1024
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808 - 10 * 7_087_872  # GPT-2's
    with pytest.raises(DataError, match="does/not/exist"):
        task.fingerprint()


def test_without_transformers_the_error_says_what_to_install(bare_bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[hf\]'"):
        causal(bare_bin).build_model()


# Tasks of one's own.


class Bigrams(TextTask):
    """A language model of one's own is a model and a loss."""

    def build_model(self) -> nn.Module:
        return nn.Embedding(self.vocabulary, self.vocabulary)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        tokens_BT, targets_BT = batch
        logits_NV = model(tokens_BT).flatten(0, 1)
        return nn.functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum"), targets_BT.numel()


def test_a_text_task_of_ones_own_needs_two_methods(bare_bin: Path) -> None:
    task = Bigrams(str(bare_bin), context=8, vocabulary=40)
    assert task.loss(task.build_model(), task.collate([task.train_data()[0]]))[1] == 8
    with pytest.raises(ConfigError, match="found context=0"):
        Bigrams(str(bare_bin), context=0)


class Doubling(Task):
    """The least that a task can be."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(4)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        x_B1, y_B1 = batch
        return (model(x_B1) - y_B1).square().sum(), len(x_B1)


def test_a_task_of_ones_own_needs_three_methods() -> None:
    task = Doubling()
    batch = task.collate(task.train_data())
    assert batch[0].shape == (4, 1)
    model = task.build_model()
    assert task.loss(model, batch)[1] == 4
    assert task.evaluate(model, batch) == {"loss": task.loss(model, batch)}
    assert task.valid_data() is None
    assert (task.derive({"loss": 1.0}, "train"), task.fingerprint(), task.tokens_per_sample()) == ({}, {}, 1)
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]
