"""Small data sets held in memory: which samples are held out, samples as a dataset, the sets scikit-learn bundles.

Legend of shapes: S samples of a set.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.errors import DataError

__all__ = ["Rows", "bundled", "content_hash", "held_out"]


class Rows(TensorDataset):
    """Sample i is row i of each tensor."""

    keyed = False
    """Nothing random in a sample: the loader need not seed for it."""

    def __init__(self, *tensors_S: Tensor) -> None:
        super().__init__(*tensors_S)


def held_out(samples_S: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    """Which samples are held out: the ``fraction`` with the lowest hashes of their content, (S,).

    It depends on nothing but the samples: no seed, and not the order in which they lie. Equal samples stay together, so
    that none is both trained on and tested; a few more than asked for may be held out for that.

    >>> held_out(np.array([[1.0], [2.0], [3.0], [4.0], [5.0]]), fraction=0.4).tolist()
    [True, False, True, False, False]
    """
    hashes_S = np.array([xxhash.xxh3_64_intdigest(sample.tobytes()) for sample in samples_S], dtype=np.uint64)
    count = round(fraction * len(hashes_S))
    if count == 0:
        return np.zeros(len(hashes_S), dtype=np.bool_)
    held: NDArray[np.bool_] = hashes_S <= np.partition(hashes_S, count - 1)[count - 1]
    return held


def content_hash(*arrays: NDArray[Any]) -> dict[str, Any]:
    """What a resume must find again: a hash of all values, in order, and how many samples there are."""
    content = xxhash.xxh3_128()
    for array in arrays:
        content.update(f"{array.dtype}{array.shape}".encode())
        content.update(array.tobytes())
    return {"xxh3_128": content.hexdigest(), "samples": len(arrays[0])}


def bundled(name: Literal["digits", "diabetes"]) -> Any:
    """A data set that comes with scikit-learn, as it returns it. Imports scikit-learn; nothing is downloaded.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            f"cannot load the {name} data",
            found=str(error),
            needed="scikit-learn, which bundles it",
            fix="Install it: pip install 'paceline[sklearn]'",
        ) from error
    return datasets.load_digits() if name == "digits" else datasets.load_diabetes(scaled=False)
