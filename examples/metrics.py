"""Metrics over uneven shards: counts are added up and divided once; a mean of means counts a small shard too much.

    python examples/metrics.py
    paceline launch -n 2 examples/metrics.py

Lane 0 has 100 samples and 90 of them right, lane 1 has 20 and 10. All of `run.evaluate`'s values equal those of one
process that looks at all samples at once, which the second column computes without Paceline.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import paceline
from paceline import metrics

CLASSES = 3


def make_outputs() -> tuple[Tensor, Tensor]:
    """What a model has said of 120 samples, and what is right."""
    generator = torch.Generator().manual_seed(0)
    targets_N = torch.randint(CLASSES, (120,), generator=generator)
    wrong_N = torch.cat([torch.arange(100) >= 90, torch.arange(20) >= 10])
    said_N = torch.where(wrong_N, (targets_N + 1) % CLASSES, targets_N)
    return F.one_hot(said_N, CLASSES) * 3 + torch.rand(120, CLASSES, generator=generator), targets_N


def main() -> None:
    run = paceline.Run(paceline.Recipe(batch=200, micro_batch=100, lanes=2, steps=1))
    logits_NC, targets_N = make_outputs()
    means: list[float] = []

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, metrics.Metric | tuple[Tensor | float, float]]:
        logits_BC, targets_B = batch
        means.append((logits_BC.argmax(-1) == targets_B).float().mean().item())
        return {
            "accuracy": metrics.accuracy(logits_BC, targets_B),
            "perplexity": metrics.perplexity(F.cross_entropy(logits_BC, targets_B, reduction="sum"), len(targets_B)),
            "f1": metrics.f1(logits_BC, targets_B, average="macro"),
            "confusion": metrics.confusion_matrix(logits_BC, targets_B),
        }

    scores = run.evaluate(TensorDataset(logits_NC, targets_N), score)
    all_means = [mean for theirs in run.gather(means) for mean in theirs]
    run.print(f"accuracy: mean of means {sum(all_means) / len(all_means):.4f}, from counts {scores['accuracy']:.4f}")

    said_N = logits_NC.argmax(-1)
    confusion_CC = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    confusion_CC.index_put_((targets_N, said_N), torch.tensor(1), accumulate=True)
    right_C = confusion_CC.diag()
    f1 = (2 * right_C / (confusion_CC.sum(0) + confusion_CC.sum(1))).double().mean()
    run.print(f"perplexity {scores['perplexity']:.4f}, at once {F.cross_entropy(logits_NC, targets_N).exp():.4f}")
    run.print(f"macro F1 {scores['f1']:.4f}, at once {f1:.4f}")
    run.print(f"confusion {scores['confusion']}, at once {confusion_CC.tolist()}")


if __name__ == "__main__":
    main()
