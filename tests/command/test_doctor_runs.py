"""The doctor's run pass over real scripts: it changes nothing, tells what it saw, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from paceline.doctor.reading import read
from paceline.doctor.watching import Limits, Watched, watch

COMPUTES = """
import hashlib, json, os, random
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Noisy(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((6,), float(i)) + torch.randn(6) + numpy.random.rand() + random.random()

def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7 + rank); numpy.random.seed(rank); random.seed(rank)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    direct = DataLoader(data, batch_size=4, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader if epoch else direct:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
    told = {
        "losses": losses, "weights": digest(model.state_dict().values()), "threads": torch.get_num_threads(),
        "drawn": [torch.rand(1).item(), float(numpy.random.rand()), random.random()],
        "environment": sorted(k for k in os.environ if k.startswith(("LOCAL", "RANK", "WORLD", "GROUP", "MASTER"))),
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()),
    }
    print(f"told {rank} {json.dumps(told)}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(source: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.write_text(source)
    return path


def watched(source: str, *arguments: str, steps: int = 20, timeout_s: float = 120.0) -> tuple[Watched, float]:
    began_s = time.monotonic()
    script, limits = write(source), Limits(steps=steps, timeout_s=timeout_s)
    told = watch(script, arguments, limits, circumstances=read(script).circumstances)
    return told, time.monotonic() - began_s


def told_by(rank: int, printed: str) -> object:
    (told,) = re.findall(rf"told {rank} ({{[^}}]*}})", printed)  # ranks may write into one another's lines
    return json.loads(told)


def test_a_script_computes_what_it_does_without_the_doctor() -> None:
    script = write(COMPUTES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    plain = subprocess.run([*launch, str(script)], check=True, timeout=120, capture_output=True, text=True).stdout
    told = watch(script, [], Limits(steps=100, timeout_s=120))
    for rank in (0, 1):
        assert told_by(rank, told.printed[rank]) == told_by(rank, plain)
    assert {finding.id for finding in told.findings if finding.level == "error"} <= set()
    assert not [note for note in told.notes if "failed" in note]


def test_a_hang_is_ended_and_told_with_both_places() -> None:
    write("def report(dist, value):\n    dist.all_reduce(value)\n", "reporting.py")
    told, took_s = watched(
        GROUP
        + "from reporting import report\n"
        + "def main():\n    chief = rank == 0\n    value = torch.ones(1)\n    if chief:\n        report(dist, value)\n"
        + "    dist.barrier()\nmain()\n"
    )
    assert took_s < 60
    (finding,) = [finding for finding in told.findings if finding.level == "error"]
    assert (finding.id, finding.path, finding.line) == ("rank-conditional-collective", "reporting.py", 2)
    assert "rank 1 is at barrier (train.py:10)" in finding.evidence


@pytest.mark.parametrize(
    ("last", "says"),
    [
        pytest.param(
            "import os\nif rank == 1: os._exit(3)\ndist.barrier()\n",
            "rank 1 failed first: it left with exit code 3",
            marks=pytest.mark.long,
        ),
        (
            "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n",
            "rank 1 failed first: killed by signal 9",
        ),
        ("import not_there_at_all\n", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        pytest.param("print(input())\n", "EOFError", marks=pytest.mark.long),
    ],
    ids=["os._exit", "SIGKILL", "missing import", "stdin"],
)
def test_who_failed_first_is_told(last: str, says: str) -> None:
    told, took_s = watched(GROUP + last)
    assert took_s < 60
    assert any(says in note for note in told.notes), told.notes


def test_a_rank_that_fails_alone_has_not_come_to_its_end() -> None:
    told, _ = watched(GROUP + "dist.barrier()\nassert rank, 'no disk'\ndist.barrier()\n")
    assert any("rank 0 failed first at" in note and "no disk" in note for note in told.notes)
    assert [finding.id for finding in told.findings if finding.level == "error"] == []


def test_endless_scripts_and_endless_output_are_ended() -> None:
    told, took_s = watched(GROUP + "while True:\n    print('x' * 10_000)\n", timeout_s=20)
    assert took_s < 40
    assert any("time was up" in note for note in told.notes)


def test_a_script_is_ended_after_enough_steps_and_tells_how_far_it_is() -> None:
    heard: list[str] = []
    source = (
        GROUP
        + "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        + "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        + "while True:\n    model(torch.ones(4, 2)).sum().backward()\n    optimizer.step()\n    print('done')\n"
    )
    told = watch(write(source), [], Limits(steps=5, timeout_s=120), tell=heard.append)
    assert heard[0] == "starting 2 workers"
    assert heard[-1] == "step 5 of 5"
    assert len(told.printed) == 2
    assert all(text.startswith("done\n") for text in told.printed)
    assert any("steps on each rank (--steps)" in note for note in told.notes)
    assert not [finding for finding in told.findings if finding.level == "error"]


WRITES = """
import json, os, subprocess, sys
from pathlib import Path
import safetensors.torch, torch, torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
here, elsewhere = Path(__file__).resolve().parent, Path(sys.argv[1])
weights = {"w": torch.ones(300_000)}
acts = {
    "append": lambda: open("kept.txt", "a").write("changed"),
    "read back": lambda: open("kept.txt").read() == "as it waschanged" or 1 / 0,
    "save": lambda: torch.save(weights, "outputs/run1/last.pt"),
    "save over a link": lambda: torch.save(weights, here / "large.bin"),
    "remove": lambda: os.remove("outputs/run1/old.pt"),
    "safetensors": lambda: safetensors.torch.save_file(weights, "model.safetensors"),
    "mkdir": lambda: (here / "new").mkdir(),
    "workers": lambda: [batch.sum() for batch in DataLoader(torch.ones(64, 4), 8, num_workers=2)],
    "word": lambda: torch.save(weights, Path(sys.argv[2]) / "last.pt"),
    "program": lambda: subprocess.run("echo x > other.bin", shell=True, check=True, stderr=subprocess.DEVNULL),
    "absolute": lambda: open(elsewhere / "file", "w").write("changed"),
    "absolute in C": lambda: safetensors.torch.save_file(weights, elsewhere / "file"),
    "save elsewhere": lambda: torch.save(weights, elsewhere / "last.pt"),
}
said = {}
if dist.get_rank() == 0:
    for name, act in acts.items():
        try:
            act()
        except Exception as error:
            said[name] = type(error).__name__
    print("told", 0, json.dumps(said), flush=True)
    print("pid", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    os.remove(elsewhere / "file")
dist.barrier()
"""


def test_whatever_writes_changes_no_file_of_the_users_and_what_it_started_is_ended(
    in_a_folder: Path, tmp_path: Path
) -> None:
    for folder in ("outputs/run1", "data"):
        Path(folder).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("as it was")
    Path("kept.txt").write_text("as it was")
    for name in ("large.bin", "other.bin", "model.safetensors", "outputs/run1/last.pt", "outputs/run1/old.pt"):
        Path(name).write_bytes(bytes(400_000))
    for number in range(5_100):
        Path(f"data/{number}").touch()
    script, elsewhere = write(WRITES), str(tmp_path / "elsewhere")
    before = {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}
    told = watch(script, [elsewhere, f"{in_a_folder}/outputs"], Limits(timeout_s=120))
    assert {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")} == before
    refused = dict.fromkeys(("absolute", "absolute in C", "save elsewhere"), "RefusedError")
    assert told_by(0, told.printed[0]) == {**refused, "program": "CalledProcessError"}
    (pid,) = [int(line.split()[1]) for line in told.printed[0].splitlines() if line.startswith("pid ")]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # not yet reaped
    notes = "\n".join(told.notes)
    assert f"was not let write {elsewhere}/file (" in notes and "--in-place" in notes
    assert "a part of the doctor" not in notes and "Landlock" not in notes


def test_ranks_that_start_ranks_are_told_at_once() -> None:
    told, took_s = watched(
        "import torch.multiprocessing as mp\ndef work(rank):\n    pass\n"
        "if __name__ == '__main__':\n    mp.spawn(work, nprocs=2)\n"
    )
    assert took_s < 60
    assert [finding.id for finding in told.findings] == ["spawn-under-torchrun"]


def test_a_script_for_gpus_runs_on_the_cpu() -> None:
    told, _ = watched(
        "import os, sys, torch, torch.distributed as dist\n"
        "if not torch.cuda.is_available() or torch.accelerator.device_count() < 2:\n    sys.exit()\n"
        "dist.init_process_group('nccl')\nlocal = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(local)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.SyncBatchNorm(1)).to(local)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nscaler = torch.amp.GradScaler('cuda')\n"
        "for _ in range(2):\n    with torch.autocast('cuda'):\n"
        "        loss = model(torch.ones(2, 4, device=f'cuda:{local}').to(local)).mean()\n"
        "    optimizer.zero_grad()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n"
        "stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)\n"
        "with torch.cuda.stream(stream):\n    moved = torch.ones(2).cuda(non_blocking=True)\n    event.record()\n"
        "torch.cuda.current_stream().wait_stream(stream)\nmoved.record_stream(torch.cuda.current_stream())\n"
        "assert moved.is_cuda and event.elapsed_time(event) == 0.0\n"
        "torch.cuda.nvtx.range_push('saving')\nstates = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()\n"
        "torch.cuda.set_rng_state(states[0])\ntorch.cuda.nvtx.range_pop()\n"
        "assert torch.cuda.FloatTensor([1.0]).item() + torch.cuda.memory_stats()['active.all.peak'] == 1.0\n"
        "states = [None, None]\ndist.all_gather_object(states, moved)\n"
        "torch.cuda.synchronize()\ndist.destroy_process_group()\n"
    )
    note = "the script asks for GPUs: what it asks of them was done on the CPU, and it was told that there are some"
    assert told.notes == (note,)
    assert told.findings == ()


@pytest.mark.long
def test_what_the_cpu_cannot_do_of_a_gpu_is_not_blamed_on_the_script() -> None:
    told, _ = watched(
        "import torch\nassert torch.cuda.is_available()\ntorch.ones(1).cuda()\ngraph = torch.cuda.CUDAGraph()\n"
    )
    assert told.cannot is not None and told.cannot in told.notes
    assert "train.py:4: RuntimeError: Tried to instantiate" in told.cannot and "the CPU stood in" in told.cannot


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        signal.SIGKILL,
    ],
)
def test_nothing_is_left_behind_when_the_doctor_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Not those either whom a rank puts into a session of their own."""
    write("import os, sys, time\nopen(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\ntime.sleep(600)\n", "child.py")
    write(
        "import os, subprocess, sys, time\nopen(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        "alone = os.environ['RANK'] == '0'\n"
        "subprocess.Popen([sys.executable, 'child.py', sys.argv[1]], start_new_session=alone)\ntime.sleep(600)\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    pids = Path(tempfile.mkdtemp(dir="/dev/shm"))  # to which ranks may write
    family: list[psutil.Process] = []
    doctor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from pathlib import Path; from paceline.doctor.watching import Limits, watch;"
            f"watch(Path('train.py'), [{str(pids)!r}], Limits(steps=1, timeout_s=300))",
        ],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 60
        while len(list(pids.iterdir())) < 4:
            assert time.monotonic() < deadline_s, "the ranks have not started"
            time.sleep(0.05)
        family = [psutil.Process(int(path.name)) for path in pids.iterdir()]
        family += psutil.Process(doctor.pid).children(recursive=True)
        os.kill(doctor.pid, number)
        doctor.wait(30)
        _, alive = psutil.wait_procs(set(family), timeout=20)
        assert not alive
        assert not list(temporary.iterdir())
    finally:
        doctor.kill()
        doctor.wait()
        shutil.rmtree(pids)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.long
def test_a_heartbeat_does_not_hide_a_hang() -> None:
    """A thread that sleeps and tells goes on whatever the rank waits for."""
    told, took_s = watched(
        "import threading, time\n"
        + GROUP
        + "def beat():\n    while True:\n        time.sleep(0.6)\n        print('alive', flush=True)\n"
        + "threading.Thread(target=beat, daemon=True).start()\n"
        + "if rank == 0:\n    dist.all_reduce(torch.ones(1))\n"
        + "dist.barrier()\n"
    )
    assert took_s < 60
    assert [finding.id for finding in told.findings if finding.level == "error"] == ["rank-conditional-collective"]


@pytest.mark.long
def test_time_is_for_all_that_is_run() -> None:
    """A script that wants GPUs is started twice."""
    told, took_s = watched("import time\ntime.sleep(5)\nraise RuntimeError('no cuda')\n", timeout_s=7)
    assert took_s < 10
    assert told.cannot is not None
