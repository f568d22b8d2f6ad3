"""Regression on a table: a multilayer perceptron on standardised columns, measured in the target's own units.

Legend of shapes: S rows of the table, B of a micro-batch, F features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import DataError
from paceline.tasks.in_memory import Rows, bundled, content_hash, held_out
from paceline.tasks.table import Columns, Table, read_csv
from paceline.tasks.task import Task, require

__all__ = ["Tabular"]


class Tabular(Task):
    """A number predicted from other numbers, on a CSV file with a header line or on data that scikit-learn bundles.

    Features and target are standardised by mean and standard deviation of the training part; the loss is the squared
    error in those units, the metrics ``mse``, ``mae``, ``rmse`` and ``r2`` are in the target's own.

    ``diabetes`` is the progression of the disease over a year (25 to 346) of 442 patients from ten measurements:
    B. Efron et al.: Least Angle Regression, Annals of Statistics 32, 2004. It needs the extra ``[sklearn]``.

    Args:
        data: path of a CSV file (UTF-8, commas, dots in decimals), or ``diabetes``.
        target: name of the column to predict; ``null``: that of ``diabetes``.
        features: names of the columns to predict it from; ``null``: all others.
        width: of each hidden layer.
        layers: hidden layers; 0 is linear regression.
        dropout: probability, after each hidden layer.
        valid: fraction of the rows held out, chosen by their content.
    """

    places = ("data",)

    def __init__(
        self,
        data: str = "diabetes",
        target: str | None = None,
        features: list[str] | None = None,
        width: int = 64,
        layers: int = 2,
        dropout: float = 0.0,
        valid: float = 0.2,
    ) -> None:
        own = "target" if data == "diabetes" else None
        require(bool(target or own), "target", target, "the name of a column", f"Say which column of {data} to predict")
        require(width >= 1, "width", width, "units >= 1", "Use width: 64")
        require(layers >= 0, "layers", layers, "hidden layers >= 0", "Use layers: 2")
        require(0 <= dropout < 1, "dropout", dropout, "a probability, 0 <= dropout < 1", "Use dropout: 0.1")
        require(0 <= valid < 1, "valid", valid, "a fraction, 0 <= valid < 1", "Use valid: 0.2")
        self.data, self.target, self.features = data, target or str(own), features
        self.width, self.layers, self.dropout, self.valid = width, layers, dropout, valid

    def build_model(self) -> nn.Module:
        """Standardised features (B, F) to the standardised target (B, 1)."""
        sizes = [self.table.cells.shape[1] - 1, *[self.width] * self.layers]
        hidden = [
            module
            for inputs, outputs in itertools.pairwise(sizes)
            for module in (nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(self.dropout))
        ]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))

    def train_data(self) -> Rows:
        """Standardised rows: features (F,) and target, float32."""
        return self._rows(~self._held)

    def valid_data(self) -> Rows | None:
        """The held-out rows likewise; ``None`` with ``valid: 0``."""
        return self._rows(self._held) if self.valid else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        """Squared error in units of the training target's variance, summed over the rows."""
        error_B = _error(model, batch)
        return error_B.square().sum(), len(error_B)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor | float, float]]:
        """``loss``, and ``mse`` and ``mae`` in the target's units."""
        error_B = _error(model, batch)
        own_B, rows = error_B.double() * float(self._scaling[1][-1]), len(error_B)
        return {
            "loss": (error_B.square().sum(), rows),
            "mse": (own_B.square().sum(), rows),
            "mae": (own_B.abs().sum(), rows),
        }

    def derive(self, scores: Mapping[str, Any], split: Literal["train", "valid"]) -> dict[str, float]:
        """``rmse``, and ``r2``, the part of the held-out target's variance that is explained; 1 is perfect."""
        if "mse" not in scores:
            return {}
        variance = float(self.table.cells[self._held, -1].var())
        explained = {"r2": 1 - scores["mse"] / variance} if variance else {}
        return {"rmse": math.sqrt(scores["mse"]), **explained}

    def fingerprint(self) -> dict[str, Any]:
        """A hash of the rows, and the names of the columns."""
        columns = {"features": list(self.table.columns.features), "target": self.table.columns.target}
        return {**content_hash(self.table.cells), **columns}

    @cached_property
    def table(self) -> Table:
        """The data as it is, opened on first use.

        Raises:
            DataError: it cannot be read, or does not suffice to train and test on.
        """
        table = self._bundled() if self.data == "diabetes" else read_csv(Path(self.data), self.target, self.features)
        rows = len(table.cells)
        held = round(self.valid * rows)
        if rows - held < 2 or (self.valid and held < 2):
            raise DataError(
                f"cannot train on {self.data}",
                found=f"{rows} rows, of which {held} are held out",
                needed="2 or more to train on, and 2 held out unless valid is 0",
                fix="Add rows, or change task.init_args.valid",
            )
        return table

    def _bundled(self) -> Table:
        diabetes = bundled("diabetes")
        columns = Columns.choose([*diabetes.feature_names, "target"], self.target, self.features, "diabetes")
        return Table(columns=columns, cells=np.column_stack([diabetes.data, diabetes.target])[:, columns.places])

    @cached_property
    def _held(self) -> NDArray[np.bool_]:
        """Whether a row is held out, (S,)."""
        return held_out(self.table.cells, self.valid)

    @cached_property
    def _scaling(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of each column over the rows to train on; the target's are last."""
        cells = self.table.cells[~self._held]
        if not len(cells):
            raise DataError(
                f"cannot train on {self.data}",
                found="rows that are all alike, and so all held out",
                needed="some that differ",
                fix="Check the data",
            )
        constant = cells.min(0) == cells.max(0)
        if constant[-1]:
            raise DataError(
                f"cannot learn {self.target!r} from {self.data}",
                found=f"{cells[0, -1]:g} in every row to train on",
                needed="a target that varies",
                fix="Name another task.init_args.target, or check the data",
            )
        return cells.mean(0), np.where(constant, 1.0, cells.std(0))

    def _rows(self, chosen: NDArray[np.bool_]) -> Rows:
        mean, deviation = self._scaling
        standardised = torch.tensor((self.table.cells[chosen] - mean) / deviation, dtype=torch.float32)
        return Rows(standardised[:, :-1], standardised[:, -1])


def _error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x_BF, y_B = batch
    prediction_B1: Tensor = model(x_BF)
    return prediction_B1.float().squeeze(-1) - y_B
