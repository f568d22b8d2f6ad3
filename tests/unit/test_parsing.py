"""Settings from YAML and the command line; each mistake says where it is and what to write."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.config import Execution, Optimizer, Recipe, Schedule
from paceline.errors import ConfigError
from paceline.parsing import Settings, TaskSpec, describe, dump, parse
from paceline.tasks import Language, Task


@dataclass(frozen=True, kw_only=True)
class Source:
    files: str | list[str]
    valid: float = 0.05


class Picture(Task):
    def __init__(self, folder: Path = Path("pictures"), *, scale: float = 1.0) -> None:
        self.folder, self.scale = folder, scale

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def train_data(self) -> Dataset[Any]:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        raise NotImplementedError


class Digits(Picture):
    def __init__(
        self,
        data: str,
        width: int = 64,
        kind: Literal["small", "large"] = "small",
        flip: bool = False,
        source: Source | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.data, self.width, self.kind, self.flip, self.source = data, width, kind, flip, source


class Half(Task):
    """Lacks everything that a task must have."""


class NoTask:
    pass


PATH = f"{__name__}.Digits"
WHOLE = f"""\
task:
  class_path: {PATH}
  init_args: {{data: d, width: 32}}
recipe:
  steps: 200
  optimizer: {{lr: 1e-3}}
execution: {{workers: auto}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(WHOLE)
    return tmp_path


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(argv)
    message = str(error.value)
    assert error.value.fix or "special characters" in message, message
    for raw in ("Parser key", "typing.", "<class", "Traceback"):
        assert raw not in message
    return message


def test_a_file_and_its_defaults(here: Path) -> None:
    found = parse(["run.yaml"])
    assert found.recipe == Recipe(steps=200, optimizer=Optimizer(lr=1e-3))
    assert found.execution == Execution(run_dir="runs/run")
    assert found.run_dir == Path("runs/run") and found.config_path == Path("run.yaml")
    assert found.task.class_path == PATH
    assert dict(found.task.init_args) == {
        "data": "d",
        "width": 32,
        "kind": "small",
        "flip": False,
        "source": None,
        "folder": "pictures",
        "scale": 1.0,
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["run.yaml", "--recipe.micro_batch", "4", "-n", "2", "--run-dir", "out"],
        ["--recipe.micro-batch=4", "-n2", "--config", "run.yaml", "--run_dir=out"],
        ["--recipe.micro_batch", "9", "--config=run.yaml", "--recipe.micro_batch", "4", "-n=2", "--run-dir=out"],
        ["run.yaml", "--recipe", "{micro_batch: 4}", "--execution", "{workers: 2, run_dir: out}"],
    ],
)
def test_spellings_of_one_command(here: Path, argv: list[str]) -> None:
    found = parse(argv)
    assert found.recipe == Recipe(steps=200, micro_batch=4, optimizer=Optimizer(lr=1e-3))
    assert found.execution == Execution(workers=2, run_dir="out")


def test_values_are_laid_over_at_any_depth(here: Path) -> None:
    words = """
        run.yaml --recipe.optimizer.betas "[0.8, 1]" --recipe.optimizer.init-args.nesterov true --recipe.seed 010
        --recipe.optimizer "{init_args: {momentum: 0.9}}" --recipe.max_norm null --task.source.files "[a, b]"
        --task.data 123 --task.init_args.folder 7
    """
    found = parse(shlex.split(words))
    assert found.recipe.optimizer == Optimizer(lr=1e-3, betas=(0.8, 1.0), init_args={"nesterov": True, "momentum": 0.9})
    assert (found.recipe.seed, found.recipe.max_norm) == (10, None)
    task = found.task.make()
    assert isinstance(task, Digits)
    assert task.source == Source(files=["a", "b"]) and task.data == "123" and task.folder == Path("7")


def test_yaml_means_what_it_says(here: Path) -> None:
    (here / "run.yaml").write_text(WHOLE.replace("data: d", "data: no").replace("steps: 200", "steps: 1_000"))
    found = parse(["run.yaml"])
    assert found.task.init_args["data"] == "no" and found.recipe.steps == 1000


def test_a_bare_name_is_one_of_ours(here: Path) -> None:
    found = parse(["run.yaml", "--task", "{class_path: Language, init_args: {width: 64}}"])
    assert found.task.class_path == "paceline.tasks.Language"
    assert isinstance(found.task.make(), Language)


@pytest.mark.parametrize("name", ["blocks.0", "blocks.*", "blocks.[4-7]", "a.b.c.d"])
def test_names_in_a_mapping_on_the_command_line_keep_their_dots(here: Path, name: str) -> None:
    written = parse(["run.yaml", "--execution.recompute", f'{{"{name}": full, other: keep}}'])
    assert written.execution.recompute == {name: "full", "other": "keep"}
    over = ["--execution.recompute", "{a.b: full}", "--execution.recompute", "{a.b: keep, a.c: full}"]
    assert parse(["run.yaml", *over]).execution.recompute == {"a.b": "keep", "a.c": "full"}


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        *((nothing, "Use none for no recompute") for nothing in ("{}", "[]", "null", "~", "false", "0", "no", "''")),
        *((everything, "Use all, or auto") for everything in ("true", "1", "yes")),
        ("sometimes", "Use all, or name blocks: [blocks.0, blocks.2]"),
        ("blocks.0", "For a block of that name write [blocks.0]"),
        ("[1]", "write ['1']"),
        ("[null]", "write ['null']"),
        ("every:0", "Did you mean 'every:2'?"),
        ("{a: {}}", "Leave it out for the default, none"),
        ("{a: half}", "full, keep, selective"),
    ],
)
def test_what_is_no_way_to_recompute_is_refused_with_what_to_write(here: Path, value: str, fix: str) -> None:
    message = refused("run.yaml", "--execution.recompute", value)
    assert message.startswith("cannot use execution.recompute") and fix in message
    if fix.startswith("Use"):
        assert "a list of module paths, or a mapping" in message


def test_an_empty_mapping_changes_nothing_where_there_is_one(here: Path) -> None:
    assert parse(["run.yaml", "--recipe", "{}", "--recipe.optimizer", "{}", "--execution", "{}"]) == parse(["run.yaml"])


def test_the_demo_is_a_whole_run() -> None:
    found = parse([])
    assert found.config_path is None and found.run_dir == Path("runs/demo")
    assert isinstance(found.task.make(), Language)
    assert parse(["-n", "3"]) == dataclasses.replace(found, execution=dataclasses.replace(found.execution, workers=3))


def test_a_task_beside_the_configuration(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "beside_the_configuration.py").write_text(f"from {__name__} import Digits as Mine\n")
    assert parse(["run.yaml", "--task.class_path", "beside_the_configuration.Mine"]).task.class_path.endswith("Mine")


@pytest.mark.parametrize(
    ("argv", "beats"),
    [
        (["--recipe.step", "3"], ["recipe.step", "'steps'"]),
        (["--steps", "3"], ["--recipe.steps"]),
        (["--confg", "x"], ["--config"]),
        (["--recipe.optimizer.lrr", "3"], ["'lr'"]),
        (["--task.witdh", "3"], ["'width'"]),
        (["--task.source.fils", "3"], ["'files'"]),
        (["--task.source.valid", "3"], ["no task.init_args.source.files"]),
        (["--recipe.steps", "1e2"], ["1e2 (a float)", "a whole number", "Write 100"]),
        (["--recipe.steps", "abc"], ["abc (text)", "a whole number"]),
        (["--recipe.batch", "null"], ["null", "a whole number"]),
        (["--recipe.batch", "true"], ["true", "a whole number"]),
        (["--recipe.compile", "3"], ["true or false"]),
        (["--recipe.tail", "shot"], ["short or pad or drop", "'short'"]),
        (["--recipe.optimizer", "3"], ["a mapping of class_path, lr"]),
        (["--recipe.optimizer.betas", "[1]"], ["[a number, a number]"]),
        (["--recipe.steps", "{a: 1}"], ["a mapping", "a whole number"]),
        (["--recipe.steps", "{}"], ["{} (a mapping)", "a whole number"]),
        (["--execution", "{recompute: {}}"], ["recompute={}", "Use none for no recompute, or name blocks"]),
        (["--recipe", "3"], ["a mapping"]),
        (["--recipe", "{"], ["stream end"]),
        (["--recipe.steps"], ["nothing behind it"]),
        (["--recipe.steps", "--recipe.seed", "1"], ["nothing behind it"]),
        (["--config"], ["FILE"]),
        (["-n", "many"], ["a whole number or auto"]),
        (["-n", "20"], ["lanes=8, workers=20"]),
        (["-n", "0"], ["workers=0"]),
        (["-x"], ["-x"]),
        (["other.yaml"], ["run.yaml and other.yaml"]),
        (["--recipe.epochs", "3"], ["steps=200, epochs=3"]),
        (["--recipe.batch", "100"], ["64 or 128"]),
        (["--task.class_path", "nowhere.X"], ["'nowhere'"]),
        (["--task.class_path", f"{__name__}.Digit"], ["'Digits'"]),
        (["--task.class_path", f"{__name__}.refused"], ["of type function"]),
        (["--task.class_path", f"{__name__}.NoTask"], ["class NoTask", "subclass"]),
        (["--task.class_path", f"{__name__}.Half"], ["abstract", "build_model"]),
        (["--task.class_path", "Languge"], ["'Language'"]),
    ],
)
def test_mistakes_on_the_command_line(here: Path, argv: list[str], beats: list[str]) -> None:
    message = refused("run.yaml", *argv)
    assert [beat for beat in beats if beat not in message] == [], message


@pytest.mark.parametrize(
    ("old", "new", "beats"),
    [
        ("recipe:", "recip:", ["recip (run.yaml, line 5)", "'recipe'"]),
        ("steps: 200", "stepz: 200", ["line 5", "'steps'"]),
        ("steps: 200", "steps: 1e2", ["line 5", "1e2 (a float)", "Write 100"]),
        ("steps: 200", "steps: 2\n  steps: 3", ["a second 'steps' in line 6"]),
        ("steps: 200", "steps: 2\n  epochs: 3", ["steps=2, epochs=3"]),
        ("lr: 1e-3", "lrr: 1", ["line 6", "'lr'"]),
        ("lr: 1e-3", "lr: fast", ["line 6", "fast (text)", "a number"]),
        ("data: d", "data: 3", ["line 3", "3 (a whole number)", "text"]),
        ("data: d, ", "", ["no task.init_args.data"]),
        ("data: d", "data: d, widht: 3", ["'width'"]),
        ("  init_args", "  init_arg", ["'init_args'"]),
        (f"  class_path: {PATH}\n", "", ["no task.class_path"]),
        ("{workers: auto}", "{workers: [1}", ["line 7", "',' or ']'"]),
        ("execution:", "\texecution:", ["line 7", "\\t"]),
        ("execution:", "---\nexecution:", ["another document in line 7"]),
        ("{workers: auto}", "&x {workers: *x}", ["contains itself"]),
        ("{workers: auto}", "{[1]: 2}", ["no text in line 7"]),
        ("{workers: auto}", "!!python/object:os.x 1", ["tag"]),
        ("{workers: auto}", "3", ["a mapping"]),
        ("auto", "\0", ["#x0000"]),
        (WHOLE, "", ["an empty file"]),
        (WHOLE, "# nothing", ["an empty file"]),
        (WHOLE, "- 1", ["a mapping"]),
    ],
)
def test_mistakes_in_a_file(here: Path, old: str, new: str, beats: list[str]) -> None:
    assert old in WHOLE
    (here / "run.yaml").write_text(WHOLE.replace(old, new))
    message = refused("run.yaml")
    assert "run.yaml" in message or beats[0].startswith(("no task", "steps="))
    assert [beat for beat in beats if beat not in message] == [], message


def test_files_that_cannot_be_read(here: Path) -> None:
    assert "Did you mean run.yaml" in refused("rum.yaml")
    assert "no such file" in refused("nowhere/else.yaml")
    assert "--recipe.steps 3" in refused("recipe.steps=3")
    assert "directory" in refused(str(here))
    (here / "bytes.yaml").write_bytes(b"a: \xff")
    assert "byte 3 is no UTF-8" in refused("bytes.yaml")


def test_a_broken_module_of_the_user_keeps_its_traceback(here: Path) -> None:
    (here / "broken_task_module.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        parse(["run.yaml", "--task.class_path", "broken_task_module.X"])


positive = st.integers(1, 10**6)
some_float = st.floats(1e-12, 1e12)
texts = st.text(st.characters(exclude_categories=["C"]), min_size=1) | st.sampled_from(
    ["null", "1e3", "no", "3", "~", "[", "{a: b"]
)


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    lanes, micro_batch = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    recipe = Recipe(
        lanes=lanes,
        micro_batch=micro_batch,
        batch=lanes * micro_batch * draw(st.integers(1, 4)),
        steps=draw(positive),
        tail=draw(st.sampled_from(["short", "pad", "drop"])),
        seed=draw(st.integers(0, 2**63 - 1)),
        optimizer=Optimizer(
            lr=draw(some_float),
            betas=draw(st.none() | st.tuples(some_float, some_float)),
            init_args=draw(
                st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), some_float | st.booleans() | texts)
            ),
        ),
        schedule=Schedule(warmup=draw(st.integers(0, 100)), final=draw(st.floats(0, 1))),
        max_norm=draw(st.none() | some_float),
        skip_loss_above=draw(st.none() | st.just(float("inf")) | some_float),
        loss_chunks=draw(st.none() | positive),
        init_from=draw(st.none() | texts),
    )
    execution = Execution(
        workers=draw(st.integers(1, lanes)),
        checkpoint_every=draw(st.none() | positive),
        bucket_mib=draw(st.floats(1e-12, 1e9)),
        run_dir=draw(texts),
    )
    arguments = {
        "data": draw(texts),
        "width": draw(st.integers(-(2**70), 2**70)),
        "kind": draw(st.sampled_from(["small", "large"])),
        "flip": draw(st.booleans()),
        "source": draw(st.none() | st.fixed_dictionaries({"files": texts | st.lists(texts), "valid": some_float})),
        "folder": str(Path(draw(texts))),
        "scale": draw(some_float),
    }
    return Settings(task=TaskSpec(class_path=PATH, init_args=arguments), recipe=recipe, execution=execution)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(whole=all_settings())
def test_what_is_dumped_parses_back_to_equal_settings(tmp_path: Path, whole: Settings) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(whole), encoding="utf-8")
    assert parse([str(path)]) == whole


def test_every_setting_is_described() -> None:
    described = {name: note for name, _, note in describe()}
    fields = [f"execution.{item.name}" for item in dataclasses.fields(Execution)]
    fields += [
        f"recipe.{item.name}" for item in dataclasses.fields(Recipe) if item.name not in ("optimizer", "schedule")
    ]
    assert [
        name for name in [*fields, "recipe.optimizer.lr", "recipe.schedule.warmup"] if not described.get(name)
    ] == []
