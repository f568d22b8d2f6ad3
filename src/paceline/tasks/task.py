"""What a run trains: model, data, loss and metrics in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

__all__ = ["Task"]


class Task(ABC):
    """A model with its data, its loss and its metrics. Subclass it to train something of your own.

    The constructor's typed arguments are what ``task.init_args`` may hold in the configuration (described by its
    docstring's ``Args:``). It must be cheap and open no data: settings are checked in places that never train. A whole
    task, used as ``class_path: mine.Digits``::

        class Digits(Task):
            def __init__(self, data: str, width: int = 64) -> None:
                self.data, self.width = data, width

            def build_model(self) -> nn.Module:
                return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

            def train_data(self) -> Dataset[Any]:
                return TensorDataset(*torch.load(self.data))

            def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
                x_BF, y_B = batch
                return F.cross_entropy(model(x_BF), y_B, reduction="sum"), len(y_B)

    Losses and metrics are pairs (sum, weight): all sums and all weights of the team are added, then divided once, so
    that no sample counts for more because of the worker or the micro-batch it fell into. Nothing here is collective;
    every method but the constructor is called in every worker, with torch's generator seeded by the run.
    """

    places: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that only say where something lies. A resume need not match them: the data may have moved,
    and its content is in the `fingerprint`."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model on the CPU in float32, initialised from torch's global generator, which the caller has seeded."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """The training samples: a map-style dataset with a length, the same in every worker."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        """The loss of one micro-batch as (sum over its samples or tokens, how many those are); never a mean."""

    def valid_data(self) -> Dataset[Any] | None:
        """The held-out samples, or ``None``: then nothing is evaluated."""
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, float]]:
        """Each metric of one held-out micro-batch as (sum, weight), without gradients; at least ``loss``."""
        return {"loss": self.loss(model, batch)}

    def derive(self, scores: Mapping[str, float], split: Literal["train", "valid"]) -> dict[str, float]:
        """Further values that follow from the divided ``scores`` of a split, such as a perplexity from a loss."""
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """One batch from a list of samples; torch's ``default_collate`` unless overridden."""
        return default_collate(list(samples))

    def tokens_per_sample(self) -> int:
        """What one sample counts for in the run's tokens per second; 1 where a sample is no sequence."""
        return 1

    def fingerprint(self) -> dict[str, Any]:
        """JSON that changes when the data does (content hashes, sizes); a resume must match it."""
        return {}
