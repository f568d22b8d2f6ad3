"""What `make demo` runs: prepare the built-in corpus, train on it, sample, and prove that workers do not matter.

Each line that starts with ``$`` is a command to type yourself; nothing here does more than run them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORPUS = "data/python-stdlib"
RUN = "runs/demo"


def show(title: str) -> None:
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}", flush=True)


def call(*words: str) -> str:
    """Runs one command before the reader's eyes; its last line when it is captured."""
    print("$", " ".join(f"'{word}'" if " " in word else word for word in words), flush=True)
    module = {"paceline": "paceline", "torchrun": "torch.distributed.run"}[words[0]]
    command = [sys.executable, "-m", module, *words[1:]]
    if words[0] == "paceline":
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            sys.exit(code)
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    show("1. Real text: the source of this Python's standard library")
    if (ROOT / CORPUS / "index.json").exists():
        print(f"{CORPUS} is there already")
    else:
        call("paceline", "prepare", "python-stdlib", "--valid", "0.01", "--out", CORPUS)

    show("2. A small GPT, 2 workers")
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    call("paceline", "train", "examples/demo.yaml", "-n", "2", "--run-dir", RUN)

    show("3. What it has learned")
    call("paceline", "sample", RUN, "--prompt", "def ", "--tokens", "200", "--temperature", "0.6", "--seed", "1")

    show("4. The proof, on a little job: the same bits on any number of workers")
    call("paceline", "verify", "examples/tiny.yaml", "--workers", "1,2,3")

    show("5. Lose a worker, lose nothing: two of three workers are killed (kill -9) on the way")
    faults = "kill worker=1 step=7; kill worker=0 step=13"
    call("paceline", "verify", "examples/tiny.yaml", "--workers", "3", "--faults", faults)

    show("6. The same little job in plain DistributedDataParallel")
    lines = [
        call("torchrun", "--standalone", f"--nproc_per_node={n}", "examples/plain_ddp.py", "examples/tiny.yaml")
        for n in (1, 2, 3)
    ]
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
