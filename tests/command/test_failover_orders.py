"""Losses at moments in which the workers do not stand at the same place: each order of events once went wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from driving import paceline, start, wait_for

PROLOGUE = """
import os, signal, sys, time, torch, torch.nn.functional as F
import paceline
import paceline.step
from paceline.errors import StepAbandoned
from paceline.membership import FailoverTeam

DATA = [(torch.full((4,), i / 64), torch.tensor(float(i % 2))) for i in range(64)]
run = paceline.Run(
    paceline.Recipe(batch=8, micro_batch=2, lanes=4, steps={steps}, device="cpu"),
    paceline.Execution(run_dir={run_dir!r}, timeout_s=60),
)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
run.track(model=model, optimizer=optimizer)
first = run.gather(os.getpid())  # of the workers that started


def train_step(step):
    for x, y in step:
        step.backward(F.mse_loss(model(x).squeeze(1), y, reduction="sum"), weight=len(y))
    step.update(optimizer)


def lose(rank):
    time.sleep(0.3)  # the others go on to where they wait
    os.kill(first[rank], signal.SIGKILL)
    raise StepAbandoned


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, also of several workers at once


mine = first.index(os.getpid()) if os.getpid() in first else None
again = bool(int(os.environ["PACELINE_RESTARTS"]))
"""


def script(folder: Path, body: str, *, steps: int = 20, run_dir: str | None = None) -> str:
    (folder / "program.py").write_text(PROLOGUE.format(steps=steps, run_dir=run_dir) + body)
    return "program.py"


BEHIND_A_STEP = """
real, hit = paceline.step.Step._reduce, []

def reduce(step):
    real(step)
    if mine == 1 and (step.number, step.phase) == (8, {phases} - 1) and not hit and not again:
        hit.append(1)
        lose(2)

paceline.step.Step._reduce = reduce
bodies = []
for done in run.steps(DATA, *[train_step] * {phases}):
    bodies.append((done if {phases} == 1 else done[0]).step)
say("rank", run.rank, "bodies", bodies)
"""


@pytest.mark.parametrize("phases", [1, pytest.param(2, marks=pytest.mark.long)])
def test_who_is_behind_a_step_runs_its_body_once_too(tmp_path: Path, phases: int) -> None:
    program = script(tmp_path, BEHIND_A_STEP.format(phases=phases))
    ended = paceline("launch", "-n", "3", program, cwd=tmp_path).check()
    assert "begin again from" not in ended.err
    for rank in (0, 1):
        assert f"rank {rank} bodies {list(range(1, 21))}" in ended.out


BEHIND_A_CALL = """
class Counted:
    n = 0.0
    def state_dict(self):
        return {"n": self.n}
    def load_state_dict(self, state):
        self.n = state["n"]

counted = Counted()
run.track(counted=counted)
real, hit = FailoverTeam._attempt, []

def attempt(team, make, call):
    gave = real(team, make, call)
    if "evaluate" in call and mine == 1 and run.position == 6 and not hit:
        hit.append(1)
        lose(2)
    return gave

FailoverTeam._attempt = attempt
for done in run.steps(DATA, train_step):
    run.evaluate(DATA, lambda batch: {"loss": (F.mse_loss(model(batch[0]).squeeze(1), batch[1]), 1)})
    counted.n += 1
say("rank", run.rank, "counted", counted.n)
"""


def test_who_is_behind_a_call_keeps_its_own_state(tmp_path: Path) -> None:
    ended = paceline("launch", "-n", "3", script(tmp_path, BEHIND_A_CALL), cwd=tmp_path).check()
    for rank in (0, 1):
        assert f"rank {rank} counted 20.0" in ended.out


NEW_TENSORS = """
class Average:
    n = torch.zeros(3)
    def state_dict(self):
        return {"n": self.n.clone()}
    def load_state_dict(self, state):
        self.n = state["n"].clone()

run.track(average=Average())

def slow(step):
    if step.number == 5 and mine == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train_step(step)

for done in run.steps(DATA, slow):
    pass
"""


def test_states_that_are_made_anew_each_time_are_no_changes(tmp_path: Path) -> None:
    ended = paceline("launch", "-n", "3", script(tmp_path, NEW_TENSORS), cwd=tmp_path).check()
    assert "worker 1 was killed" in ended.err and "begin again from" not in ended.err


CHANGED_BEFORE = """
def changing(step):
    with torch.no_grad():
        model.bias.add_(1)
    if step.number == 5 and mine == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    train_step(step)

for done in run.steps(DATA, changing):
    pass
run.print("bias", model.bias.item())
"""


def test_a_step_that_cannot_be_redone_begins_again_from_the_checkpoint(tmp_path: Path) -> None:
    program = script(tmp_path, CHANGED_BEFORE, steps=8)
    lost = paceline("launch", "-n", "2", program, cwd=tmp_path).check()
    assert "had changed tracked state" in lost.err
    (tmp_path / "program.py").write_text((tmp_path / "program.py").read_text().replace("mine == 1 and", "False and"))
    assert paceline("launch", "-n", "2", program, cwd=tmp_path).check().out == lost.out


TWO_LOOPS = """
for done in run.steps(DATA, train_step):
    if done.step == 5:
        break
run.barrier()
for done in run.steps(DATA, train_step):
    if done.step == 10 and mine == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.005)
run.print("workers", run.world_size)
"""


def test_a_replacement_is_let_into_the_second_loop(tmp_path: Path) -> None:
    ended = paceline("launch", "-n", "3", script(tmp_path, TWO_LOOPS, steps=600), cwd=tmp_path).check()
    assert "workers 3" in ended.out


BEHIND_ITS_RUN = """
for done in run.steps(DATA, train_step):
    pass
run.close()
say("exporting")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_behind_its_run_is_a_failure(tmp_path: Path) -> None:
    ended = paceline("launch", "-n", "1", script(tmp_path, BEHIND_ITS_RUN, steps=3), cwd=tmp_path).check(1)
    assert "worker 0 was killed" in ended.err


OWN_CODE = """
for done in run.steps(DATA, train_step):
    if done.step == 5:
        run.request_stop(42)
"""


def test_a_stop_with_a_code_of_ones_own(tmp_path: Path) -> None:
    assert paceline("launch", "-n", "2", script(tmp_path, OWN_CODE), cwd=tmp_path).check(42).err == ""


FOR_EVER = """
for done in run.steps(DATA, train_step):
    time.sleep(0.02)
    if run.is_main and done.step == 5:
        open("going", "w").close()
"""


def test_a_signal_to_every_process_of_the_job_saves(tmp_path: Path) -> None:
    program = script(tmp_path, FOR_EVER, steps=100_000, run_dir="run")
    started = start("launch", "-n", "2", program, cwd=tmp_path)
    wait_for(lambda: (tmp_path / "going").exists(), started)
    for process in started.all_processes():
        process.send_signal(signal.SIGTERM)
    started.wait().check(75)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
