"""What recompute (activation checkpointing) frees and costs: 12 blocks, of which none, all or every other recompute.

    python examples/recompute.py

Plain torch and Paceline's meter. Autograd keeps what backward needs: most of it lies inside the blocks, the widened
activations above all. A block under `checkpoint` keeps its input only, and runs its forward again during backward. So
memory falls by the insides of those blocks, and time grows by their forwards; no bit of a gradient changes.

"Packed" counts a tensor each time autograd saves it, weights too. "Held" is memory: each storage once, and no weights,
which are there anyway.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.memory import saved_bytes

RECOMPUTED = {"none": (), "all": range(12), "every other": range(0, 12, 2)}
"""Numbers of the blocks that run twice."""


def make_block() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256))


def forward(blocks: list[nn.Module], recomputed: Collection[int], h_BTF: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        h_BTF = checkpoint(block, h_BTF, use_reentrant=False) if number in recomputed else block(h_BTF)
    return h_BTF


def seconds(run: partial[Tensor]) -> float:
    """Of one forward and backward."""
    begun = time.perf_counter()
    run().square().sum().backward()
    return time.perf_counter() - begun


def main() -> None:
    torch.manual_seed(0)
    blocks, x_BTF = [make_block() for _ in range(12)], torch.randn(8, 128, 256)
    runs = {name: partial(forward, blocks, recomputed, x_BTF) for name, recomputed in RECOMPUTED.items()}
    saved = {name: saved_bytes(run) for name, run in runs.items()}
    # In turn, so that a busy moment of the machine meets all of them.
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(2)]
    for name in runs:
        best_ms = 1000 * min(times[name] for times in rounds)
        packed_mib, held_mib = saved[name].packed / 2**20, saved[name].held / 2**20
        print(f"{name:<12} {packed_mib:6.1f} MiB packed for backward, {held_mib:6.1f} MiB held, {best_ms:4.0f} ms")


if __name__ == "__main__":
    main()
