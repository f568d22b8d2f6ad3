"""The tasks on small data sets in memory: what is held out, what a sample is, metrics in one's own units, mistakes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.determinism import seed_by
from paceline.errors import ConfigError, DataError
from paceline.metrics import Mean
from paceline.parsing import parse
from paceline.tasks import CausalLM, Digits, Tabular, Task
from paceline.tasks.digits import turn
from paceline.tasks.in_memory import held_out

EXAMPLES = Path(__file__).parents[2] / "examples"


# What all of them do.


@pytest.mark.parametrize("cls", [CausalLM, Digits, Tabular])
def test_an_example_configures_each(cls: type[Task]) -> None:
    names = {CausalLM: "causal_lm.yaml", Digits: "digits.yaml", Tabular: "tabular.yaml"}
    settings = parse([str(EXAMPLES / names[cls]), "--recipe.seed", "1"])
    assert type(settings.task.make()) is cls
    assert settings.recipe.steps is not None


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        ("width", "wide", r"cannot use task.init_args.width .* found wide \(text\), need a whole number"),
        ("with", "3", "cannot use task.init_args.with .* Did you mean 'width'"),
    ],
)
def test_arguments_are_typed(word: str, value: str, message: str) -> None:
    for name in ("digits.yaml", "tabular.yaml"):
        with pytest.raises(ConfigError, match=message):
            parse([str(EXAMPLES / name), f"--task.{word}", value])


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (Digits, {"width": 0}),
        (Digits, {"dropout": 1.0}),
        (Digits, {"shift": 8.0}),
        (Digits, {"rotation": -1.0}),
        (Tabular, {"width": 0}),
        (Tabular, {"layers": -1}),
        (Tabular, {"dropout": -0.1}),
        (Tabular, {"valid": 1.0}),
        (Tabular, {"target": "price", "data": "nowhere.csv", "width": -1}),
    ],
)
def test_making_one_opens_no_data_but_checks_its_arguments(cls: Callable[..., Task], arguments: dict[str, Any]) -> None:
    *_, (name, value) = arguments.items()
    with pytest.raises(ConfigError, match=rf"cannot use task.init_args.{name}: found {name}={value}, need .*\. Use "):
        cls(**arguments)


@pytest.mark.parametrize("task", [Digits(), Tabular()], ids=["digits", "tabular"])
def test_without_scikit_learn_the_error_says_what_to_install(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"cannot load the .* pip install 'paceline\[sklearn\]'"):
        task.train_data()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.floats(0, 0.99), st.randoms(use_true_random=False))
def test_what_is_held_out_follows_from_the_samples_alone(numbers: list[int], fraction: float, random: Any) -> None:
    def held(some: list[int]) -> list[int]:
        return sorted(
            number for number, out in zip(some, held_out(np.array(some)[:, None], fraction), strict=True) if out
        )

    out = held(numbers)
    assert len(out) >= round(fraction * len(numbers))
    assert not set(out) & (set(numbers) - set(out))
    assert out == sorted(number for number in numbers if number in out)  # equal samples stay together
    shuffled = list(numbers)
    random.shuffle(shuffled)
    assert held(shuffled) == out


def test_the_fraction_held_out_is_the_one_asked_for() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 3))
    assert held_out(rows, 0.25).sum() == 250
    assert not held_out(rows, 0.0).any()


# Digits.


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(width=4)


def test_digits_are_split_once_and_for_all(digits: Digits) -> None:
    train, valid = digits.train_data(), digits.valid_data()
    assert (len(train), len(valid)) == (1438, 359)  # type: ignore[arg-type]
    classes = [int(valid[index][1]) for index in range(359)]
    assert min(classes.count(digit) for digit in range(10)) >= 25
    image_1HW, class_ = valid[0]
    assert (image_1HW.shape, image_1HW.dtype, class_.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert (image_1HW.min(), image_1HW.max()) == (0, 1)
    plain = Digits(shift=0, rotation=0).train_data()
    seen = {plain[index][0].numpy().tobytes() for index in range(1438)}
    assert not seen & {valid[index][0].numpy().tobytes() for index in range(359)}


def test_a_digit_looks_otherwise_by_the_generator_and_only_by_it(digits: Digits) -> None:
    data, plain = digits.train_data(), Digits(shift=0, rotation=0).train_data()
    looks = []
    for epoch in (0, 1, 0):
        seed_by(0, "sample", epoch, 7)
        looks.append(data[7][0])
    assert torch.equal(looks[0], looks[2])
    assert not torch.equal(looks[0], looks[1])
    assert 0.01 < (looks[0] - plain[7][0]).abs().mean() < 0.3
    assert data[7][1] == plain[7][1]


def test_turning_and_moving_an_image() -> None:
    image_1HW = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    moved_1HW = torch.zeros(1, 8, 8)
    moved_1HW[:, 2:, :-1] = image_1HW[:, :-2, 1:]
    for angle, right, down, expected in [
        (0.0, 0.0, 0.0, image_1HW),
        (0.0, -1.0, 2.0, moved_1HW),
        (math.pi / 2, 0.0, 0.0, image_1HW.rot90(-1, (1, 2))),
        (-math.pi, 0.0, 0.0, image_1HW.flip(1, 2)),
    ]:
        assert torch.allclose(turn(image_1HW, angle, right, down), expected, atol=1e-5, rtol=0)


def test_digits_are_measured_by_sums(digits: Digits) -> None:
    data, model = digits.valid_data(), digits.build_model().eval()
    batch = digits.collate([data[index] for index in range(12)])
    loss, weight = digits.loss(model, batch)
    metrics = digits.evaluate(model, batch)
    assert metrics["loss"] == (loss, weight)
    assert weight == 12
    right = sum(int(model(batch[0][i : i + 1]).argmax() == batch[1][i]) for i in range(12))
    assert metrics["accuracy"] == Mean(sum=float(right), weight=12.0)


# Tables.


@pytest.fixture
def csv(tmp_path: Path) -> Callable[..., str]:
    def write(text: str | bytes) -> str:
        path = tmp_path / "some.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


HOUSES = '\ufeffid, area ,rooms,price\r\nA,50.5,2,1e5\r\n\r\n"B,b",-.5,"3",200000\r\nC,0,4,-3\r\nD, 7 ,1,+0.1\r\n'


def test_a_table_is_read_as_it_is_written(csv: Callable[..., str]) -> None:
    table = Tabular(csv(HOUSES), "price", ["rooms", "area"], valid=0.0).table
    assert (table.columns.features, table.columns.target) == (("rooms", "area"), "price")
    assert table.cells.tolist() == [[2, 50.5, 1e5], [3, -0.5, 2e5], [4, 0, -3], [1, 7, 0.1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found an empty file, need a header line"),
        ("a;b;y\n1;2;3\n", r"cannot find the column 'y' .* found a;b;y\. Separate the columns by commas"),
        ("a,b,yy\n1,2,3\n", r"cannot find the column 'y' .* found a, b, yy\. "),
        ("a,A,b,target_y\n", "cannot find the column 'y'"),
        ("a,y,a\n1,2,3\n", "found 1 names of more than one column: a, need another name"),
        ("y\n1\n", r"cannot predict 'y' .* found no other column"),
        ("a,y\n1,2\n\n1,2,3\n", r"some.csv, line 4: found 3 cells, need 2, as in the header"),
        ("a,y\n1,2\nx,2\n", r"cannot use the column 'a' .*, line 3: found 'x', need a finite number"),
        ("a,y\n1,2\n1,\n", r"cannot use the column 'y' .*, line 3: found an empty cell"),
        ("a,y\n1,NaN\n", r"column 'y' .*, line 2: found 'NaN'"),
        ("a,y\n-inf,1\n", r"column 'a' .*, line 2: found '-inf'"),
        ("a,y\n1_000,1\n", r"column 'a' .*, line 2: found '1_000'"),
        ('a,y\n"1,5",1\n', r"column 'a' .*, line 2: found '1,5'"),
        ('a,y\n1,2\n"3"4,5\n', r"cannot read the table .*, line 3: found"),
        ("a,y\n1,2\n1,3\n", "found 2 rows, of which 0 are held out"),
        ("a,y\n", "found 0 rows"),
        ("a,y\n" + "".join(f"{row},3\n" for row in range(20)), "cannot learn 'y' .* found 3 in every row"),
        (b"a,y\n\xff,1\n", "found byte 0xff, which is no UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_table_is_told_with_its_line(csv: Callable[..., str], text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tabular(csv(text), "y").train_data()


def test_mistakes_in_naming_tables_and_columns(csv: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the table .*none.csv: found No such file or directory"):
        Tabular(str(tmp_path / "none.csv"), "y").train_data()
    with pytest.raises(ConfigError, match=r"found target=None, need the name of a column. Say which column of x.csv"):
        Tabular("x.csv")
    with pytest.raises(DataError, match=r"cannot find the column 'room' .* Did you mean 'rooms'"):
        Tabular(csv(HOUSES), "price", ["room"]).train_data()
    with pytest.raises(DataError, match="found the target among the features price"):
        Tabular(csv(HOUSES), "price", ["price"]).train_data()
    with pytest.raises(DataError, match=r"column 'id' .*, line 2: found 'A'.* task.init_args.features"):
        Tabular(csv(HOUSES), "price").train_data()
    with pytest.raises(DataError, match=r"cannot find the column 'bmj' in diabetes: .* Did you mean 'bmi'"):
        Tabular(target="bmj").train_data()


def test_what_is_trained_on_is_standardised_by_itself(csv: Callable[..., str]) -> None:
    rows = np.random.default_rng(0).normal(3, 5, size=(60, 3))
    text = "a,b,c,y\n" + "".join(f"{a!r},{b!r},7,{y!r}\n" for a, b, y in rows.tolist())
    task = Tabular(csv(text), "y")
    x_SF, y_S = (torch.stack(column) for column in zip(*(task.train_data()[i] for i in range(48)), strict=True))
    assert x_SF.dtype == y_S.dtype == torch.float32
    assert x_SF.mean(0).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert x_SF.std(0, correction=0).tolist() == pytest.approx([1, 1, 0])  # a constant column is nothing
    assert y_S.std(correction=0).item() == pytest.approx(1)
    held = task.valid_data()
    assert held is not None
    assert len(held) == 12
    assert abs(float(torch.stack([held[i][1] for i in range(12)]).mean())) > 1e-3  # by the others' mean


def test_a_table_is_measured_in_the_targets_own_units(csv: Callable[..., str]) -> None:
    rows = np.random.default_rng(1).normal(100, 30, size=(80, 3))
    text = "a,b,y\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows.tolist())
    task = Tabular(csv(text), "y", layers=1, width=4)
    model, held = task.build_model().eval(), task.valid_data()
    assert held is not None
    parts = [range(5), range(5, 16)]
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for part in parts:
            batch = task.collate([held[i] for i in part])
            for name, (value, weight) in task.evaluate(model, batch).items():
                assert weight == len(part)
                sums[name] = sums.get(name, 0) + torch.as_tensor(value, dtype=torch.float64)
        x_BF, _ = task.collate([held[i] for i in range(16)])
        predicted_B = model(x_BF).squeeze(-1).double().numpy()
    train = rows[~held_out(rows, 0.2)]
    predicted_B = predicted_B * train[:, -1].std() + train[:, -1].mean()
    true_B = rows[held_out(rows, 0.2), -1]
    scores = {name: float(value) / 16 for name, value in sums.items()}
    mse = float(((predicted_B - true_B) ** 2).mean())
    assert scores["mse"] == pytest.approx(mse, rel=1e-5)
    assert scores["mae"] == pytest.approx(float(abs(predicted_B - true_B).mean()), rel=1e-5)
    assert scores["loss"] == pytest.approx(mse / train[:, -1].var(), rel=1e-5)
    r2 = 1 - ((predicted_B - true_B) ** 2).sum() / ((true_B - true_B.mean()) ** 2).sum()
    derived = task.derive(scores, "valid")
    assert derived == {"rmse": pytest.approx(math.sqrt(mse)), "r2": pytest.approx(r2, rel=1e-4)}
    assert task.derive({"loss": 1.0}, "train") == {}


def test_layers_and_held_out_rows_may_be_none(csv: Callable[..., str]) -> None:
    task = Tabular(csv("a,b,y\n1,2,3\n4,5,7\n"), "y", layers=0, valid=0.0)
    assert [type(module) for module in task.build_model()] == [nn.Linear]  # type: ignore[attr-defined]
    assert len(task.train_data()) == 2
    assert task.valid_data() is None


def test_the_fingerprint_follows_the_content_not_the_place(csv: Callable[..., str], tmp_path: Path) -> None:
    def fingerprint(path: str, *features: str) -> dict[str, Any]:
        return Tabular(path, "price", list(features), valid=0.0).fingerprint()

    before = fingerprint(csv(HOUSES), "rooms", "area")
    assert before == json.loads(json.dumps(before))
    moved = tmp_path / "elsewhere.csv"
    moved.write_text(HOUSES)
    assert fingerprint(str(moved), "rooms", "area") == before
    assert "data" in Tabular.places
    assert fingerprint(str(moved), "area", "rooms") != before
    assert fingerprint(csv(HOUSES + "E,1,1,1\n"), "rooms", "area") != before
    assert Digits().fingerprint()["samples"] == 1797
