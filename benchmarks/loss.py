"""The loss in chunks against the plain one: memory, gradients and time of a forward and backward, in one run.

    python benchmarks/loss.py [--chunks 1 8 32] [--rounds 5] [--precision fp32] [--width 256] [--samples 8]

A GPT with a vocabulary of 50,304 tokens, gradients added to buffers as in a run; the ways take turns. Reported for each
number of chunks:

* peak: the most bytes of tensors alive at a time, above what is there before and after a step, and how much lower that
  is than with the plain loss, in parts of the logits' bytes (samples x context x vocabulary, float32);
* process: the same of the process's resident memory (Linux), which holds what a kernel allocates inside too;
* gradient: the largest difference of a parameter's gradient, relative to the plain one's norm;
* time: the median of the rounds' ratios to the plain loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.determinism import autocast, configure_thread, seed_by
from paceline.memory.live import LiveBytes
from paceline.models import GPT, GPTConfig

MIB = 2**20


class Bench:
    """One model and one micro-batch, for any number of chunks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        heads = max(1, arguments.width // 64)
        shape = {"context": arguments.context, "width": arguments.width, "layers": arguments.layers}
        shape |= {"heads": heads, "kv_heads": heads, "hidden": -(-8 * arguments.width // (3 * 64)) * 64}
        seed_by("loss")
        self.precision: Literal["fp32", "bf16"] = arguments.precision
        self.model = GPT(GPTConfig(vocabulary=arguments.vocabulary, tied=arguments.tied, **shape))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.tokens_BT = torch.randint(arguments.vocabulary, (arguments.samples, arguments.context))
        self.logit_bytes: int = 4 * self.tokens_BT.numel() * arguments.vocabulary

    def step(self, chunks: int | None) -> None:
        """A forward and a backward; gradients add up."""
        with autocast(self.precision, torch.device("cpu")):
            loss: Tensor = self.model(self.tokens_BT, self.tokens_BT.roll(-1, 1), loss_chunks=chunks)
        loss.backward()

    def gradients(self, chunks: int | None) -> list[Tensor]:
        """Of one step."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for grad in grads:
            grad.zero_()
        self.step(chunks)
        return [grad.clone() for grad in grads]

    def peak_bytes(self, chunks: int | None) -> int:
        """Most bytes of tensors alive in a step."""
        with LiveBytes() as live:
            self.step(chunks)
        peak: int = live.peak
        return peak

    def process_bytes(self, chunks: int | None) -> int | None:
        """Most bytes that the process grows by in a step."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            before = _resident_bytes("VmRSS")
            self.step(chunks)
            return _resident_bytes("VmHWM") - before
        except OSError:
            return None  # the system does not say

    def seconds(self, chunks: int | None) -> float:
        """Of one step."""
        begun = time.perf_counter()
        self.step(chunks)
        return time.perf_counter() - begun


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def difference(grads: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """The largest relative one."""
    return max(float((grad - other).norm() / other.norm()) for grad, other in zip(grads, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    arguments = parser.parse_args()
    configure_thread(1)
    bench = Bench(arguments)
    ways: list[int | None] = [None, *arguments.chunks]
    plain_grads = bench.gradients(None)
    errors = {chunks: difference(bench.gradients(chunks), plain_grads) for chunks in ways}
    del plain_grads
    peaks = {chunks: bench.peak_bytes(chunks) for chunks in ways}
    resident = {chunks: bench.process_bytes(chunks) for chunks in ways}
    seconds: dict[int | None, list[float]] = {chunks: [] for chunks in ways}
    for number in range(arguments.rounds):
        for chunks in ways if number % 2 else reversed(ways):
            seconds[chunks].append(bench.seconds(chunks))
    print(
        f"{bench.tokens_BT.numel()} tokens, vocabulary {arguments.vocabulary}, width {arguments.width}, "
        f"{arguments.layers} layers{', tied' if arguments.tied else ''}, {arguments.precision}: "
        f"logits {bench.logit_bytes / MIB:.0f} MiB"
    )
    for chunks in ways:
        ratios = [own / plain for own, plain in zip(seconds[chunks], seconds[None], strict=True)]
        freed = f"{(peaks[None] - peaks[chunks]) / bench.logit_bytes:+.2f} logits lower"
        grown = resident[chunks]
        print(
            f"{'plain' if chunks is None else f'{chunks} chunks':>10}: peak {peaks[chunks] / MIB:6.0f} MiB, {freed}; "
            f"process {'unknown' if grown is None else f'{grown / MIB:6.0f} MiB'}; gradient {errors[chunks]:.1e}; "
            f"time {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{statistics.median(seconds[chunks]):.2f} s"
        )


if __name__ == "__main__":
    main()
