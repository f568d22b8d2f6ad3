"""What a run trains: model, data, loss and metrics in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from paceline.errors import ConfigError, DataError
from paceline.metrics import Metric
from paceline.models.loss import MOST_CHUNKS

__all__ = ["Task", "require"]


class Task(ABC):
    """A model with its data, its loss and its metrics. Subclass it to train something of your own.

    A whole task, in ``mine.py``:

    >>> import torch, torch.nn.functional as F
    >>> from torch.utils.data import TensorDataset
    >>> class Parity(Task):
    ...     def __init__(self, bits: int = 8, width: int = 64) -> None:
    ...         self.bits, self.width = bits, width
    ...
    ...     def build_model(self) -> nn.Module:
    ...         return nn.Sequential(nn.Linear(self.bits, self.width), nn.ReLU(), nn.Linear(self.width, 2))
    ...
    ...     def train_data(self) -> Dataset[Any]:
    ...         numbers_S = torch.arange(2**self.bits)
    ...         bits_SF = (numbers_S[:, None] >> torch.arange(self.bits)) & 1
    ...         return TensorDataset(bits_SF.float(), bits_SF.sum(1) % 2)
    ...
    ...     def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    ...         bits_BF, parity_B = batch
    ...         return F.cross_entropy(model(bits_BF), parity_B, reduction="sum"), len(parity_B)
    >>> task = Parity(bits=3)
    >>> batch = task.collate([task.train_data()[index] for index in range(8)])
    >>> loss, weight = task.loss(task.build_model(), batch)
    >>> weight
    8

    It is trained with ``paceline train parity.yaml``, where that file says::

        task:
          class_path: mine.Parity
          init_args: {bits: 12}
        recipe: {batch: 64, micro_batch: 8, lanes: 8, epochs: 5}

    **The constructor** says by its typed arguments what ``init_args`` may hold, and by its docstring's ``Args:`` what
    they mean. It keeps them and does no more: no data is opened, since settings are checked in places that never train.

    **Losses and metrics are sums with the number of samples or tokens in them, never means.** All sums and all weights
    of the team are added, then divided once, so that no sample counts for more because of the worker or the micro-batch
    it fell into. So: ``reduction="sum"``.

    **Every method is called in every worker** and must do the same there; nothing in a task needs to know the worker's
    rank. None of them is collective. Random numbers come from torch, numpy or `random`, which the run seeds: for the
    initial weights, for the dropout of each micro-batch, and in the dataset for each sample anew, keyed by epoch and
    index, so that augmentation is the same whoever loads the sample.
    """

    places: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that only say where something lies. A resume need not match them: the data may have moved,
    and its content is in the `fingerprint`."""

    can_chunk_loss: ClassVar[bool] = False
    """Whether `loss` heeds `loss_chunks`. A subclass with a `loss` of its own says so anew."""

    loss_chunks: int | None = None
    """Parts into which `loss` splits a micro-batch's tokens, so that the logits of one only are in memory at a time;
    ``None``: all at once. Set by `chunk_loss`."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "loss" in vars(cls):
            cls.can_chunk_loss = vars(cls).get("can_chunk_loss", False)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model on the CPU in float32, initialised from torch's global generator, which the caller has seeded.

        It stays a plain module: what ``safetensors.torch.load_file`` reads from a checkpoint's ``model.safetensors``
        loads into a new one with ``load_state_dict``.
        """

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """The training samples: a map-style dataset (``len(data)``, ``data[index]``), the same in every worker."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        """The loss of one micro-batch as (sum over its samples or tokens, how many those are); never a mean.

        ``batch`` is what `collate` made, on the model's device; it may hold fewer samples than ``recipe.micro_batch``
        at the end of an epoch.
        """

    def valid_data(self) -> Dataset[Any] | None:
        """The held-out samples, or ``None``: then nothing is evaluated."""
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor | float, float] | Metric]:
        """The metrics of one held-out micro-batch by name, at least ``loss``; each a pair (sum, weight) or a `Metric`.

        Called with the model in eval mode and without gradients, once for every held-out sample whatever the number of
        workers.
        """
        return {"loss": self.loss(model, batch)}

    def derive(self, scores: Mapping[str, Any], split: Literal["train", "valid"]) -> dict[str, float]:
        """Further values that follow from the ``scores`` of a split, such as a perplexity from a loss.

        ``scores`` are the results of `evaluate` over all held-out samples, or for ``train`` the last step's ``loss``.
        """
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """One batch from a list of samples; torch's ``default_collate`` unless overridden."""
        return default_collate(list(samples))

    def example(self, samples: int) -> Any:
        """A micro-batch of ``samples`` samples as in training, to measure with: what is in them does not matter.

        Here it is the first of `train_data`, over and over if they are fewer. Override it where the data can be left
        alone: a run can be planned then before its data is there.

        Raises:
            DataError: no samples.
        """
        data = self.train_data()
        there = len(data)  # type: ignore[arg-type]
        if not there:
            raise DataError(
                "cannot take an example", found="an empty dataset", needed="at least one sample", fix="Check the data"
            )
        return self.collate([data[index % there] for index in range(samples)])

    def chunk_loss(self, chunks: int | None, *, samples: int | None = None) -> None:
        """Sets `loss_chunks` to what the recipe says; call it before `build_model`.

        Args:
            samples: of a micro-batch.

        Raises:
            ConfigError: a number of chunks for a task that cannot, or more of them than a micro-batch has tokens.
        """
        if chunks is not None and not self.can_chunk_loss:
            raise ConfigError(
                f"cannot split the loss of {type(self).__name__}",
                found=f"loss_chunks={chunks}",
                needed="a task that computes its loss in chunks, such as Language or CausalLM",
                fix="Leave out recipe.loss_chunks; or in your own loss call paceline.models.chunked_cross_entropy "
                "and set can_chunk_loss = True",
            )
        context = self.tokens_per_sample()
        if chunks is not None and samples is not None and context > 1:
            most = min(MOST_CHUNKS, samples * context)
            if chunks > most:
                raise ConfigError(
                    f"cannot split the loss of {type(self).__name__}",
                    found=f"recipe.loss_chunks={chunks}, and micro-batches of {samples * context} tokens "
                    f"(recipe.micro_batch={samples} x {context})",
                    needed=f"at most {most}, and at least one token in each",
                    fix=f"Use recipe.loss_chunks: {min(8, most)}, or null for the whole at once",
                )
        self.loss_chunks = chunks

    def tokens_per_sample(self) -> int:
        """What one sample counts for in the run's tokens per second; 1 where a sample is no sequence."""
        return 1

    def fingerprint(self) -> dict[str, Any]:
        """JSON that changes when the data does (content hashes, sizes); a resume must match it."""
        return {}


def require(ok: bool, name: str, value: object, needed: str, fix: str) -> None:
    """Raises `ConfigError` about the task's argument ``name`` unless ``ok``."""
    if not ok:
        raise ConfigError(f"cannot use task.init_args.{name}", found=f"{name}={value!r}", needed=needed, fix=fix)
