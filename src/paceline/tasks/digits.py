"""Handwritten digits: a small convolutional network with BatchNorm, dropout and augmentation on scikit-learn's images.

Legend of shapes: S samples of a set, B of a micro-batch, C channels, H rows, W columns of pixels, K classes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.metrics import Metric, accuracy
from paceline.tasks.in_memory import Rows, bundled, content_hash, held_out
from paceline.tasks.task import Task, require

__all__ = ["Digits", "Turned", "turn"]

CLASSES = 10
SIDE = 8
"""Pixels of an image's rows and columns."""
HELD_OUT = 0.2


class Digits(Task):
    """Which of ten digits is it? On the 1797 images of 8 x 8 pixels that scikit-learn bundles (extra ``[sklearn]``).

    They are the test set of E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998. A fifth is held out, chosen by the images' content and nothing else.

    BatchNorm's statistics are per lane and micro-batch: give it micro-batches of 16 or more.

    Args:
        width: channels of the first two convolutions; the third has twice as many.
        dropout: probability, before the last layer.
        shift: pixels by which a training image is moved at most, each way; 0: none.
        rotation: degrees by which a training image is turned at most, each way; 0: none.
    """

    def __init__(self, width: int = 32, dropout: float = 0.2, shift: float = 0.7, rotation: float = 10.0) -> None:
        require(width >= 1, "width", width, "channels >= 1", "Use width: 32")
        require(0 <= dropout < 1, "dropout", dropout, "a probability, 0 <= dropout < 1", "Use dropout: 0.2")
        require(0 <= shift < SIDE, "shift", shift, f"pixels, 0 <= shift < {SIDE}", "Use shift: 0 for none")
        require(0 <= rotation <= 180, "rotation", rotation, "degrees, 0 to 180", "Use rotation: 0 for none")
        self.width, self.dropout, self.shift, self.rotation = width, dropout, shift, rotation

    def build_model(self) -> nn.Module:
        """Images (B, 1, H, W) to logits (B, K)."""
        return nn.Sequential(
            *_convolution(1, self.width),
            *_convolution(self.width, self.width),
            nn.AvgPool2d(2),
            *_convolution(self.width, 2 * self.width),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * self.width * (SIDE // 4) ** 2, CLASSES),
        )

    def train_data(self) -> Dataset[Any]:
        """Images (1, H, W) from 0 to 1 with their class; each moved and turned a little, otherwise in every epoch."""
        images_S1HW, classes_S = self._split(held=False)
        if not (self.shift or self.rotation):
            return Rows(images_S1HW, classes_S)
        return Turned(images_S1HW, classes_S, shift=self.shift, rotation=self.rotation)

    def valid_data(self) -> Dataset[Any]:
        """The held-out images as they are."""
        return Rows(*self._split(held=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Cross entropy in nats, summed over the images."""
        images_B1HW, classes_B = batch
        return _cross_entropy(model(images_B1HW), classes_B), len(classes_B)

    def evaluate(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> dict[str, tuple[Tensor | float, float] | Metric]:
        """``loss``, and ``accuracy``: the fraction of images whose most likely class is theirs."""
        images_B1HW, classes_B = batch
        logits_BK = model(images_B1HW)
        loss = _cross_entropy(logits_BK, classes_B)
        return {"loss": (loss, len(classes_B)), "accuracy": accuracy(logits_BK, classes_B)}

    def fingerprint(self) -> dict[str, Any]:
        """A hash of all images and classes."""
        return content_hash(*self._all)

    @cached_property
    def _all(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Images (S, H, W), each pixel from 0 to 16, and classes (S,)."""
        digits = bundled("digits")
        return digits.images.astype(np.uint8), digits.target.astype(np.int64)

    def _split(self, *, held: bool) -> tuple[Tensor, Tensor]:
        images_SHW, classes_S = self._all
        chosen_S = held_out(images_SHW, HELD_OUT) == held
        return torch.tensor(images_SHW[chosen_S, None] / 16, dtype=torch.float32), torch.tensor(classes_S[chosen_S])


class Turned(Dataset[tuple[Tensor, Tensor]]):
    """Images with their class, each moved and turned by amounts drawn from torch's generator.

    The loader seeds that generator by (seed, epoch, sample): what a sample looks like does not depend on who loads it.
    """

    def __init__(self, images_S1HW: Tensor, classes_S: Tensor, *, shift: float, rotation: float) -> None:
        self._images_S1HW, self._classes_S = images_S1HW, classes_S
        self._most = torch.tensor([math.radians(rotation), shift, shift])

    def __len__(self) -> int:
        return len(self._classes_S)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle, right, down = ((2 * torch.rand(3) - 1) * self._most).tolist()
        return turn(self._images_S1HW[index], angle, right, down), self._classes_S[index]


def turn(image_1HW: Tensor, angle: float, right: float, down: float) -> Tensor:
    """The image turned about its centre by ``angle`` (radians, clockwise), then moved by pixels; outside is 0.

    >>> turn(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), math.pi / 2, right=0, down=0).round()
    tensor([[[0., 0.],
             [0., 1.]]])
    """
    _, rows, columns = image_1HW.shape
    # From the centre, in pixels: where each new pixel comes from is the inverse of the move, then of the turn.
    y_H1 = (torch.arange(rows) - (rows - 1) / 2 - down)[:, None]
    x_1W = torch.arange(columns) - (columns - 1) / 2 - right
    cos, sin = math.cos(angle), math.sin(angle)
    from_x_HW, from_y_HW = cos * x_1W + sin * y_H1, cos * y_H1 - sin * x_1W
    grid_HW2 = torch.stack([from_x_HW * (2 / columns), from_y_HW * (2 / rows)], dim=-1)
    turned_11HW = F.grid_sample(image_1HW[None], grid_HW2[None], mode="bilinear", align_corners=False)
    return turned_11HW[0]


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _cross_entropy(logits_BK: Tensor, classes_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BK.float(), classes_B, reduction="sum")
