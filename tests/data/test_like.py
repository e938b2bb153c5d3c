"""Samples in the form of a run's: what predictions, live learners and nodes take alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.base.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.like import inputs_like, labelled_like

PICTURES = Arrays(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]), 2, mean=(0.5,), std=(0.25,))
NUMBERS = Arrays(torch.zeros(2, 3), torch.tensor([0.5, 1.5]), 1)


def test_pixels_are_bytes_or_numbers_whose_white_is_known() -> None:
    bright = np.full((3, 4, 4), 255, np.uint8)
    assert torch.equal(inputs_like(PICTURES, {}, bright), torch.full((3, 1, 4, 4), 2.0))
    with pytest.raises(DataError, match="give images as bytes, uint8"):
        inputs_like(PICTURES, {}, bright[:, None].astype(np.int64))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.ones((4, 3)), [1.0, 2.0, 3.0, np.nan]),  # a loss of NaN, wherever it is measured
        (np.full((4, 3), np.inf), np.ones(4)),
    ],
)
def test_values_that_are_not_finite_are_refused(x: np.ndarray, y: Any) -> None:
    with pytest.raises(DataError, match="NaN or infini"):
        labelled_like(NUMBERS, inputs_like(NUMBERS, {}, x), y)


def test_whole_numbers_are_numbers() -> None:
    arrays = labelled_like(NUMBERS, inputs_like(NUMBERS, {}, np.ones((4, 3), np.int32)), [1, 2, 3, 4])
    assert (arrays.x.dtype, arrays.y.dtype) == (torch.float32, torch.float32)
