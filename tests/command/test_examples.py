"""The programs in `examples/`, each run as its first lines say, from a directory of its own, and what it prints.

To add a program, add a line to `SHOWS`: its path, and for each way to run it the whole of its standard output.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driving import Started, paceline, script, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"

SAMPLER = """\
10 items over 3 lanes
lane 0: [0, 3, 6, 9]
lane 1: [1, 4, 7, 0]
lane 2: [2, 5, 8, 1]
dropping the tail
lane 0: [0, 3, 6]
lane 1: [1, 4, 7]
lane 2: [2, 5, 8]
shuffled over 2 lanes, and no call says which epoch it is
epoch 0, lane 0: [4, 7, 3, 0, 6], lane 1: [1, 5, 9, 8, 2]
epoch 1, lane 0: [5, 1, 0, 9, 7], lane 1: [6, 2, 8, 3, 4]
"""

PLAIN_SAMPLER = """\
10 items over 3 workers: [0, 3, 6, 9] [1, 4, 7, 0] [2, 5, 8, 1]
dropping the tail: [0, 3, 6] [1, 4, 7] [2, 5, 8]
shuffled over 2, rank 0, epoch 0: [4, 7, 3, 0, 6]
epoch 1, set_epoch forgotten: [4, 7, 3, 0, 6]
epoch 1: [5, 1, 0, 9, 7]
"""

PLAIN_TRAIN = """\
epoch 0: 32 batches per worker, loss 0.6527
epoch 1: 32 batches per worker, loss 0.5234
epoch 2: 32 batches per worker, loss 0.3867
checksums: -0.847960 0.598777 before, {-0.0326..-0.0325} {-0.0326..-0.0325} after
saved: 0.weight 0.bias 2.weight 2.bias
"""

TRAIN = """\
epoch 0: 32 steps, loss 0.6527
epoch 1: 32 steps, loss 0.5234
epoch 2: 32 steps, loss 0.3867
checksums: -0.847960%s before,%s after
saved: 0.bias 0.weight 2.bias 2.weight
digest {}
"""

AFTER = " {-0.0326..-0.0325}"

PLAIN_SKIP = """\
step 1: 0.42 skipped 3.90 skipped
step 2: 0.42 skipped nan skipped
step 3: 0.10 skipped 3.50 skipped
step 4: 0.42 taken 0.58 taken
3 of 4 skipped, weights [0.75, 0.75]
"""

SKIP = """\
step 1: 0.42 and 3.90, mean 2.16: skipped skipped
step 2: 0.42 and nan, mean nan: skipped skipped
step 3: 0.10 and 3.50, mean 1.80: taken taken
2 of 3 skipped, weights [0.1, 0.1]
"""

PLAIN_ACCUMULATE = """\
mean of means: gradients disagree after no_sync, agree after the next
mean of means: relative error {1..9} against one big batch
weighted by tokens: gradients disagree after no_sync, agree after the next
weighted by tokens: relative error {0..1e-6} against one big batch
"""

ACCUMULATE = """\
gradients of %d workers behind the loop: 1 different
1050 tokens: relative error {0..1e-6} against one big batch
digest {}
"""

GAN = """\
step 30: losses {} and {}, mean ({}, {})
step 60: losses {} and {}, mean ({}, {})
step 90: losses {} and {}, mean ({1..3}, {-2..0})
digest {}
"""

METRICS = """\
accuracy: mean of means 0.7000, from counts 0.8333
perplexity {perplexity}, at once {perplexity}
macro F1 {f1}, at once {f1}
confusion {confusion}, at once {confusion}
"""

RECOMPUTE = """\
none          143.1 MiB packed for backward,  120.1 MiB held, {} ms
all            12.0 MiB packed for backward,   12.0 MiB held, {} ms
every other    78.1 MiB packed for backward,   66.0 MiB held, {} ms
"""

BATCH_AND_RATE = """\
lr 4.00e-03 = 1.00e-03 x 256/64 (linear)
1 worker drives 8 lanes on cpu, batch 256 = 8 lanes x 1 micro-step x 32, 17 parameters
step 4/4  loss {}  lr 4.00e-03  grad norm {}
done at step 4, digest {}
none    lr 1.00e-03
linear  lr 4.00e-03
sqrt    lr 2.00e-03
workers  32 samples each        this recipe
      1  batch  32, lr 5.00e-04  batch 256, lr 4.00e-03
      2  batch  64, lr 1.00e-03  batch 256, lr 4.00e-03
      4  batch 128, lr 2.00e-03  batch 256, lr 4.00e-03
      8  batch 256, lr 4.00e-03  batch 256, lr 4.00e-03
"""

NORMALISATION = """\
BatchNorm, micro-batches of 2: an output moves by {0.2..0.7}, digest {few}
BatchNorm, micro-batches of 16: an output moves by {0.1..0.6}, digest {many}
GroupNorm, micro-batches of 2: an output moves by 0.000, digest {group}
"""

EXCHANGE_OPTIONS = """\
exchange                   1 worker  2 workers   ms a step with 2
exact, buckets of 1 MiB    {exact}  {exact}  {}
one bucket                 {exact}  {exact}  {}
no overlap                 {exact}  {exact}  {}
allreduce                  {exact}  {reduced}  {}
allreduce in bf16          {rounded}  {both}  {}
"""

GPT2 = """\
step 8: loss {3.5..5}
step 16: loss {3..4.5}
step 24: loss {3..4}
digest {}
"""

HELLO = "rank 0/2 local_rank=0 sum=3.0\nrank 1/2 local_rank=1 sum=3.0\n"

SHOWS: dict[str, dict[str, str]] = {
    "plain/hello.py": {"torchrun 2": HELLO},
    "hello.py": {"alone": "rank 0/1 local_rank=0 sum=1.0\n", "launch 2": HELLO},
    "plain/sampler.py": {"alone": PLAIN_SAMPLER},
    "sampler.py": {"alone": SAMPLER},
    "plain/train.py": {"torchrun 2": PLAIN_TRAIN},
    "train.py": {
        "alone": TRAIN % ("", AFTER),
        "torchrun 2": TRAIN % (" 0.598777", AFTER * 2),
        "launch 4": TRAIN % (" 0.598777 -5.673718 1.531871", AFTER * 4),
    },
    "plain/skip.py": {"torchrun 2": PLAIN_SKIP},
    "skip.py": {"launch 2": SKIP},
    "plain/accumulate.py": {"torchrun 2": PLAIN_ACCUMULATE},
    "accumulate.py": {"alone": ACCUMULATE % 1, "launch 2": ACCUMULATE % 2},
    "gan.py": {"alone": GAN, "launch 3": GAN},
    "metrics.py": {"alone": METRICS, "launch 2": METRICS},
    "recompute.py": {"alone": RECOMPUTE},
    "batch_and_rate.py": {"alone": BATCH_AND_RATE},
    "normalisation.py": {"alone": NORMALISATION, "launch 3": NORMALISATION},
    "exchange_options.py": {"alone": EXCHANGE_OPTIONS},
    "hf_gpt2.py": {"launch 2": GPT2},
}
"""By program: how it is run (``alone``, or a launcher and the number of workers), and all that it prints.

``{}`` stands for anything, ``{low..high}`` for a number, ``{name}`` for the same text wherever the name stands and
another for each other name. Digests must be the same for all ways to run a program.
"""
ANEW = {"recompute.py", "train.py"}
"""Alone in a fresh interpreter: one that measures its memory, and one for all."""


def start(program: str, how: str, cwd: Path, *arguments: str) -> Started:
    launcher, _, workers = how.partition(" ")
    words = [str(EXAMPLES / program), *arguments]
    cwd.mkdir()
    extra = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the numbers are a CPU's
    match launcher:
        case "torchrun":
            return torchrun(int(workers), *words, cwd=cwd, extra=extra)
        case "launch":
            return script("-m", "paceline", "launch", "-n", workers, *words, cwd=cwd, extra=extra)
        case _:
            return script(*words, cwd=cwd, extra=extra, anew=program in ANEW)


def check_shown(text: str, expected: str) -> None:
    """Fails unless ``text`` is ``expected``, in which placeholders may stand."""
    pieces = re.split(r"\{(.*?)\}", expected)
    pattern = "".join("(.+?)" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
    match = re.fullmatch(pattern, text)
    assert match, f"shown:\n{text}\nexpected:\n{expected}"
    named: dict[str, str] = {}
    for placeholder, found in zip(pieces[1::2], match.groups(), strict=True):
        low, is_range, high = placeholder.partition("..")
        if is_range:
            assert float(low) <= float(found) <= float(high), f"{found} is not in {placeholder}:\n{text}"
        elif placeholder:
            assert named.setdefault(placeholder, found) == found, f"{placeholder} differs:\n{text}"
    assert len(set(named.values())) == len(named), f"the same for two of {named}:\n{text}"


LONG = {
    "train.py": {"launch 3": TRAIN % (" 0.598777 -5.673718", AFTER * 3)},
    "gan.py": {"launch 2": GAN},
    "hf_gpt2.py": {"alone": GPT2, "launch 3": GPT2},
}
"""Further ways to run some of them, with ``--long``."""


@pytest.mark.parametrize("program", SHOWS)
def test_shows(program: str, tmp_path: Path) -> None:
    check_program(program, SHOWS[program], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("program", LONG)
def test_shows_on_other_numbers_of_workers(program: str, tmp_path: Path) -> None:
    check_program(program, SHOWS[program] | LONG[program], tmp_path)


def check_program(program: str, shows: dict[str, str], tmp_path: Path) -> None:
    running = {how: start(program, how, tmp_path / how.replace(" ", "-")) for how in shows}
    shown = {how: started.wait().check().out for how, started in running.items()}
    for how, text in shown.items():
        check_shown(text, shows[how])
    digests = {how: re.findall(r"\bdigest .*", text) for how, text in shown.items()}
    assert len(set(map(tuple, digests.values()))) == 1, digests


@pytest.mark.parametrize("how", ["launch 2", "torchrun 2"])
def test_a_failing_worker_is_shown_once_beside_the_launchers_lines(how: str, tmp_path: Path) -> None:
    ended = start("hello.py", how, tmp_path / "here", "--fail", "1").wait().check(1)
    assert ended.out == ""
    assert ended.err.count("RuntimeError: worker 1 fails, as asked\n") == 1
    own = "paceline: worker 1 failed:\n" if how == "launch 2" else "hello.py FAILED\n"
    assert ended.err.count(own) == 1
    if how == "launch 2":
        head, *trace, last, echo = ended.err.splitlines()
        assert (head, echo) == (own.strip(), "paceline: 1 other worker ended because of it")
        assert trace[0] == "Traceback (most recent call last):" and last.startswith("RuntimeError: ")


def test_order_shows_what_the_sampler_example_does(tmp_path: Path) -> None:
    told = paceline("order", "--samples", "10", "--lanes", "3", "--tail", "pad", cwd=tmp_path).check().out
    assert told in SAMPLER


def test_every_example_is_run() -> None:
    """What is not in the table is the demo's, which other tests run."""
    programs = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if path.name != "__init__.py"}
    assert programs - set(SHOWS) == {"demo.py", "plain_ddp.py"}


def test_the_example_of_a_plan_is_that_of_the_page_on_memory() -> None:
    """There its plan is made, and its figures are compared."""
    page, readme = ((EXAMPLES.parent / name).read_text(encoding="utf-8") for name in ("docs/memory.md", "README.md"))
    settings = (EXAMPLES / "gpt_124m.yaml").read_text(encoding="utf-8").split("\n", 1)[1]
    assert f"# gpt.yaml\n{settings}" in page
    shown = readme.partition("$ paceline plan examples/gpt_124m.yaml")[2].partition("```")[0].splitlines()[1:]
    assert len(shown) > 5
    assert set(shown) <= set(page.splitlines())
