"""The first program: workers add up a number, and worker 0 prints what each has to say, in order.

    python examples/hello.py
    paceline launch -n 2 examples/hello.py
    torchrun --standalone --nproc_per_node=2 examples/hello.py
    paceline launch -n 2 examples/hello.py --fail 1

With ``--fail RANK`` that worker raises. Its traceback is shown once, and the workers that end because of it are
counted.
"""

from __future__ import annotations

import argparse

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=int, metavar="RANK", help="the worker that shall fail")
    options = parser.parse_args()

    run = paceline.Run(paceline.Recipe(steps=1, device="cpu"))
    if run.rank == options.fail:
        raise RuntimeError(f"worker {run.rank} fails, as asked")

    total = float(run.sum(run.rank + 1))
    for line in run.gather(f"rank {run.rank}/{run.world_size} local_rank={run.local_rank} sum={total}"):
        run.print(line)


if __name__ == "__main__":
    main()
