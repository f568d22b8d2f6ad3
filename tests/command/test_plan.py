"""`paceline plan` as a user runs it: published figures, what fits, exit codes, mistakes told without a traceback."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import DEADLINE_S, Ended, paceline, result, script, start, write_tiny

from paceline.progress import waiting

PUBLISHED = {
    "Llama 2 7B": (6_738_415_616, {"vocabulary": 32000, "width": 4096, "layers": 32, "heads": 32, "hidden": 11008}),
    "Llama 3.2 1B": (
        1_235_814_400,
        {
            "vocabulary": 128256,
            "width": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "hidden": 8192,
            "tied": True,
        },
    ),
}

TASKS = '''
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from paceline.tasks import Task


class Looks(Task):
    """Its model reads its weights when it is made (reads=model), its loss its value (reads=loss), or neither."""

    def __init__(self, reads: str = "nothing", blocks: int = 3):
        self.reads, self.blocks = reads, blocks

    def build_model(self):
        block = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model = nn.Sequential(*[block() for _ in range(self.blocks)])
        if self.reads == "model":
            assert float(model[0][0].weight.abs().sum()) > 0
        return model

    def train_data(self):
        return TensorDataset(torch.ones(8, 32))

    def loss(self, model, batch):
        loss = model(batch[0]).square().sum()
        if self.reads == "loss":
            assert loss.item() >= 0
        return loss, len(batch[0])


class Wrong(Looks):
    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def train_data(self):
        if self.what == "data":
            raise FileNotFoundError(2, "No such file or directory", "nowhere.bin")
        return super().train_data()

    def collate(self, samples):
        return None if self.what == "nothing_to_take" else super().collate(samples)

    def loss(self, model, batch):
        if self.what == "own":
            raise KeyError("mine")
        loss = model(batch[0][:, :16] if self.what == "shapes" else batch[0]).square()
        if self.what == "no_pair":
            return loss.sum()
        if self.what == "vector":
            return loss.sum(1), len(loss)
        return {"number": 1.0, "detached": loss.sum().detach()}[self.what], len(loss)


class Huge(Looks):
    def __init__(self, built: str):
        super().__init__()
        self.built = built

    def build_model(self):
        if self.built == "alone":
            return nn.Linear(2**40, 2**30)
        model = nn.Linear(10**10, 10**6)  # 36 PiB: torch can count these, and nobody can hold them
        assert float(model.weight.detach().sum()) > 0
        return model


class OddOne(Looks):
    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def loss(self, model, batch):
        x = batch[0]
        if self.what == "penalty":
            x = x.detach().requires_grad_()
            y = model(x)
            slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.sum() + slope.square().sum(), len(x)
        if self.what == "teacher":
            model.eval()
            with torch.no_grad():
                wanted = model(x)
            return (model.train()(x) - wanted).square().sum(), len(x)
        if self.what == "twice":
            return (model(x) * model(2 * x)).sum(), len(x)
        if self.what == "dropped":
            model(x).sum()
            return model(x).square().sum(), len(x)
        if self.what == "hvp":
            slopes = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
            return sum(slope.square().sum() for slope in slopes), len(x)
        for block in reversed(model):
            x = block(x)
        return x.square().sum(), len(x)
'''


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from paceline.cli import main

ended = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ended))
"""


def plans(place: Path, *commands: list[str]) -> list[Ended]:
    """Several commands in one process; for what does not depend on the process."""
    told = json.dumps([["plan", *command] for command in commands])
    done = script("-c", ONE_AFTER_ANOTHER, told, cwd=place).wait().check()
    return [Ended(code=code, out=out, err=err, time=0.0) for code, out, err in json.loads(done.out)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a task of a user's."""
    path = tmp_path_factory.mktemp("place")
    (path / "mine.py").write_text(TASKS)
    return path


def write(place: Path, name: str, task: dict[str, Any], recipe: dict[str, Any] | None = None) -> Path:
    path = place / f"{name}.yaml"
    sizes = {"batch": 8, "micro_batch": 2, "lanes": 2, "steps": 10, "device": "cpu"} | (recipe or {})
    path.write_text(json.dumps({"task": task, "recipe": sizes}))
    return path


def language(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "paceline.tasks.Language", "init_args": {"data": "nowhere"} | arguments}


def size_of(out: str, what: str) -> float:
    """MiB in the line of ``what``."""
    found = re.search(rf"^\(?{what}\)?\s+([\d.]+) (\w+)", out, re.MULTILINE)
    assert found is not None, out
    return float(found[1]) * {"B": 2**-20, "KiB": 2**-10, "MiB": 1.0, "GiB": 1024.0}[found[2]]


@pytest.mark.parametrize("name", ["Llama 2 7B", pytest.param("Llama 3.2 1B", marks=pytest.mark.long)])
def test_a_large_model_is_planned_in_seconds_and_little_memory_with_its_published_size(place: Path, name: str) -> None:
    count, shape = PUBLISHED[name]
    config = write(place, "large", language(**shape, context=2048), {"micro_batch": 1, "precision": "bf16"})
    command = start("plan", str(config), "-n", "2", "--memory", "10GiB", cwd=place, anew=True)
    process, most = psutil.Process(command.process.pid), 0
    while command.process.poll() is None:
        most = max(most, process.memory_info().rss if process.is_running() else 0)
        time.sleep(0.05)
    ended = command.wait().check(1)
    assert f"{count:,} parameters" in ended.out
    assert most < 2**30
    assert size_of(ended.out, "parameters") == pytest.approx(4 * count / 2**20, rel=0.005)
    assert size_of(ended.out, "optimizer state") == pytest.approx(8 * count / 2**20, rel=0.005)


def test_gpt2_of_transformers_has_its_published_size(place: Path) -> None:
    pytest.importorskip("transformers")
    task = {"class_path": "paceline.tasks.CausalLM", "init_args": {"data": "nowhere", "vocabulary": 50257}}
    task["init_args"] |= {"context": 1024}  # type: ignore[operator]
    ended = paceline(
        "plan", str(write(place, "gpt2", task, {"micro_batch": 1})), "-n", "2", "--memory", "2GiB", cwd=place
    ).check(1)
    assert "124,439,808 parameters, 12 blocks" in ended.out
    assert "built for real" not in ended.out


def test_what_fits_ends_with_0_and_what_does_not_with_1(place: Path) -> None:
    config = write(place, "gpt", language(vocabulary=1000, width=128, layers=4, context=256))
    plenty = paceline("plan", str(config), "-n", "2", "--memory", "8GiB", cwd=place).check(0)
    assert "it fits" in plenty.out and "over" not in plenty.out.split("As configured")[0]
    most = size_of(plenty.out, "most at once")
    tight = paceline("plan", str(config), "-n", "2", "--memory", f"{most - 8}MiB", cwd=place).check(1)
    assert "it does not fit" in tight.out
    assert "With execution.recompute: auto it does" in tight.out
    assert "over" in tight.out
    recomputed = paceline(
        *("plan", str(config), "-n", "2", "--memory", f"{most - 8}MiB", "--execution.recompute", "all"), cwd=place
    ).check(0)
    assert size_of(recomputed.out, "most at once") < most - 8


def test_below_the_least_it_says_what_is_needed_and_what_dominates(place: Path) -> None:
    config = write(place, "gpt", language(vocabulary=1000, width=128, layers=4, context=256))
    ended = paceline("plan", str(config), "-n", "2", "--memory", "100MiB", cwd=place).check(1)
    assert re.search(r"found 100 MiB a worker \(--memory\), need at least \d+ MiB", ended.error)
    assert "MiB of process" in ended.error


def test_what_only_sharding_would_fit_is_named(place: Path) -> None:
    count, shape = PUBLISHED["Llama 3.2 1B"]
    recipe = {"lanes": 8, "micro_batch": 1, "device": "cuda"}
    config = write(place, "large", language(**shape, context=128), recipe)
    need = 16 * count // 2**20  # parameters, a gradient, and two of AdamW
    ended = paceline("plan", str(config), "-n", "8", "--memory", f"{need // 2}MiB", cwd=place).check(1)
    assert "It needs sharding of parameters, gradients and optimizer" in ended.error
    assert "not supported yet" in ended.error


MISTAKES: list[tuple[list[str], str]] = [
    (["--memory", "-1"], "cannot use --memory: found '-1'"),
    (["--memory", "many"], "need a number and a unit"),
    (["--memory", "1e99"], "Write 24GiB"),
    (["--memory", "24gigs"], "Did you mean 24GiB?"),
    (["--memory"], "nothing behind it"),
    (["--memroy", "1GiB"], "--memroy"),
    (["-n", "9"], "need 1 <= workers <= lanes"),
    (["--execution.memory", "lots"], "execution.memory"),
    (["--execution.recompute", "[blocks.9]"], "no module 'blocks.9'"),
    (["--execution.recompute", "sometimes"], "recompute"),
    (["--task.width", "10000000000"], "Check width and hidden"),
    (["--task.width", "1200000000000", "--task.heads", "12"], "Check width and hidden"),
    (["--task.vocabulary", "99999999999999"], "embedding.weight of shape (99999999999999, 32): 3.2e+15 numbers"),
    (["--task.layers", "1000000000000"], "Check layers, width and hidden"),
    (["--task.context", "100000000000"], "a tensor of 745 GiB at once, need sizes that a machine can hold"),
    (
        ["--recipe.loss_chunks", "65"],
        "recipe.loss_chunks=65, and micro-batches of 64 tokens (recipe.micro_batch=2 x 32)",
    ),
]


def test_a_mistake_is_told_in_a_line(place: Path) -> None:
    config = write(place, "gpt", language(vocabulary=100, width=32, layers=2, context=32))
    ended = plans(place, *([str(config), *words] for words, _ in MISTAKES))
    for (_, said), each in zip(MISTAKES, ended, strict=True):
        assert said in each.check(2).error


@pytest.mark.parametrize("built", ["alone", "and_read"])
def test_sizes_that_no_machine_can_hold_are_told(place: Path, built: str) -> None:
    config = write(place, "huge", {"class_path": "mine.Huge", "init_args": {"built": built}})
    (ended,) = plans(place, [str(config), "-n", "1"])
    said = ended.check(2).error
    assert "need sizes that a machine can hold" in said and "Check the sizes in task.init_args" in said
    assert "micro_batch or" not in said and len(ended.err.splitlines()) == 1


def test_more_chunks_of_the_loss_than_tokens_are_refused_before_a_run_begins(place: Path) -> None:
    words = ("--recipe.loss_chunks", "9999999", "-n", "1", "--run-dir", "chunks")
    said = paceline("train", str(write_tiny(place, "cpu")), *words, cwd=place).check(2).error
    assert "recipe.loss_chunks=9999999, and micro-batches of" in said
    assert not (place / "chunks" / "checkpoints").exists()


def test_a_long_plan_tells_what_it_does_from_the_first_seconds_on(place: Path) -> None:
    config = write(place, "deep", language(vocabulary=100, width=32, layers=10_000_000, context=32))
    words = [sys.executable, "-m", "paceline", "plan", str(config), "-n", "1", "--memory", "1GiB"]
    with subprocess.Popen(words, cwd=place, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        late = threading.Timer(DEADLINE_S, command.kill)
        late.start()
        told = command.stderr.readline()
        late.cancel()
        command.kill()
    assert re.match(r"paceline plan: building the model, [\d,]+ modules so far, \d s$", told), told


def test_time_moves_on_in_what_is_shown_while_the_work_says_nothing() -> None:
    shown = io.StringIO()
    with waiting("look", patience_s=0.05, every_s=0.05, stream=shown) as tell:
        tell("step 1 of 2")
        time.sleep(0.5)
    lines = shown.getvalue().splitlines()
    assert len(lines) > 2 and set(lines) <= {"look: step 1 of 2, 0 s", "look: step 1 of 2, 1 s"}
    with waiting("look", stream=(unseen := io.StringIO())) as tell:
        tell("step 1 of 2")
    assert unseen.getvalue() == ""


WRONG = {
    "nothing_to_take": "None from collate",
    "no_pair": "a tensor alone",
    "number": "a loss of type float",
    "vector": "a loss of shape (2,)",
    "detached": "a loss without a gradient",
    "own": "KeyError: 'mine', at ",
    "shapes": "mat1 and mat2 shapes cannot be multiplied (2x16 and 32x64), at ",
    "data": "FileNotFoundError: ",
}


def test_a_mistake_in_a_task_is_told_once_with_its_cause_and_place(place: Path) -> None:
    configs = [write(place, wrong, {"class_path": "mine.Wrong", "init_args": {"what": wrong}}) for wrong in WRONG]
    for said, ended in zip(WRONG.values(), plans(place, *([str(config)] for config in configs)), strict=True):
        assert said in ended.check(2).error
        assert len(ended.err.splitlines()) == 1, ended.err  # and nothing of torch's


ODD = ["penalty", "teacher", "twice", "dropped", "hvp", "reversed"]


def test_a_task_that_differentiates_twice_or_runs_its_model_twice_is_planned(place: Path) -> None:
    configs = [write(place, odd, {"class_path": "mine.OddOne", "init_args": {"what": odd}}) for odd in ODD]
    for ended in plans(place, *([str(config), "-n", "1"] for config in configs)):
        assert "3 blocks" in ended.check(0).out and "real" not in ended.out


def test_no_data_is_prepared(place: Path) -> None:
    prepare = {"source": "python-stdlib", "tokenizer": "bpe:300", "limit_bytes": 10000}
    task = language(data="prepared", prepare=prepare, width=32, layers=2, context=32)
    (ended,) = plans(place, [str(write(place, "unprepared", task)), "-n", "1"])
    assert "2 blocks" in ended.check(0).out
    assert not (place / "prepared").exists()


def test_help_and_the_list_of_commands_know_it(place: Path) -> None:
    assert "usage: paceline plan" in paceline("plan", "--help", cwd=place).check().out
    assert "plan [CONFIG]" in paceline("--help", cwd=place).check().out


def test_a_task_of_ones_own_is_planned_whatever_it_reads(place: Path) -> None:
    reads = {"nothing": None, "model": "The model was built for real", "loss": "Measured on real tensors"}
    configs = [write(place, read, {"class_path": "mine.Looks", "init_args": {"reads": read}}) for read in reads]
    kept = 2 * 2 * 4 * (32 + 64 + 64)  # by two of the blocks, of two samples in float32, while the third one's is made
    for said, ended in zip(
        reads.values(), plans(place, *([str(config), "-n", "1"] for config in configs)), strict=True
    ):
        assert "3 blocks" in ended.check(0).out
        assert (said in ended.out) if said else "real" not in ended.out
        assert size_of(ended.out, "kept by blocks") * 2**20 == kept


def test_a_model_without_blocks_has_nothing_to_recompute(place: Path) -> None:
    config = write(place, "one", {"class_path": "mine.Looks", "init_args": {"blocks": 1}})
    ended, refused = plans(place, [str(config), "-n", "1"], [str(config), "--execution.recompute", "auto"])
    assert "0 blocks" in ended.check(0).out and "selective" not in ended.out
    refused.check(2)
    assert "no repeated blocks" in refused.error


def test_named_blocks_are_planned_as_written(place: Path) -> None:
    config = write(place, "own", {"class_path": "mine.Looks", "init_args": {}})
    ended = paceline("plan", str(config), "-n", "1", "--execution.recompute", "[1.*, '2']", cwd=place).check(0)
    assert "as written" in ended.out and "of 5 blocks recomputed" in ended.out  # block 0, three parts of 1, and 2


def test_measure_runs_a_micro_batch_and_shows_each_block(place: Path) -> None:
    config = write(place, "gpt", language(vocabulary=100, width=32, layers=2, context=32))
    ended = paceline("plan", str(config), "--measure", "--execution.recompute", "every:2", cwd=place).check(0)
    measured = ended.out.split("measured on one micro-batch")[1]
    full, keep = (re.search(rf"blocks\.{at}\s+{level}", measured) for at, level in ((0, "full"), (1, "keep")))
    assert full and keep
    assert re.search(r"forward and backward: [\d.e-]+ s, .* process peak", measured)


def test_a_recipe_with_the_largest_micro_batch_it_names_can_be_trained(place: Path) -> None:
    config = write_tiny(place, "cpu")
    ended = paceline("plan", str(config), "-n", "2", "--memory", "400MiB", cwd=place).check(0)
    found = re.search(r"Largest micro_batch without recompute: (\d+)(.*?)\.$", ended.out, re.MULTILINE)
    assert found is not None
    more = dict(re.findall(r"recipe\.(\w+) (\d+)", found[2]))
    words = [word for name, value in more.items() for word in (f"--recipe.{name}", value)]
    words += ["--recipe.micro_batch", found[1], "--recipe.steps", "1", "-n", "2", "--run-dir", "largest"]
    paceline("train", str(config), *words, cwd=place).check(0)
    assert result(place / "largest")["status"] == "done"
