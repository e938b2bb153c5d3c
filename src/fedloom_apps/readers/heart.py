"""Heart disease by hospital, as prepared by FLamby."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError, import_extra
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, sources
from fedloom.data.sources.files import Files, reads
from fedloom_apps.readers.formats import Standardise, number, read_table, standardise

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FILES = Files(
    "Heart disease",
    (tuple(f"heart/processed.{name}.data" for name in HOSPITALS),),
    "https://archive.ics.uci.edu/dataset/45/heart+disease",
)
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")  # columns 0 1 3 4 5 7 8 9
COLUMNS = (0, 1, 3, 4, 5, 7, 8, 9)
KINDS = {2: ("cp", (1, 2, 3, 4)), 6: ("restecg", (0, 1, 2))}
FEATURES = (*NUMBERS, *(f"{name}={value}" for name, values in KINDS.values() for value in values[1:]))


@sources.register
@reads(FILES)
def heart(
    missing: Literal["drop", "mean"] = "drop", standardised: Standardise = "client", root: str | Path | None = None
) -> Source:
    """Heart disease (UCI, FLamby): presence of disease from 13 features, by hospital.

    Reads ``heart/processed.{cleveland,hungarian,switzerland,va}.data``. As in FLamby, the columns ``slope``, ``ca`` and
    ``thal``, unknown for most patients outside Cleveland, are dropped, then patients with unknown values (740 of 920
    remain); chest pain (``cp``) and resting electrocardiogram (``restecg``) are one-hot without their first value; any
    disease is class 1. FLamby's split (a third of each hospital's patients, stratified, with its seed) gives the
    training pool and the test set: FLamby's test samples of a client are ``held_out=natural``. Features are
    standardised within each hospital by the means and deviations of its training patients.

    Args:
        missing: ``drop`` patients with unknown values, or impute the hospital's ``mean`` (median for categories, 0 if
            all are unknown).
        standardised: whether features are standardised per ``client``, ``pooled``, or not (``none``).
    """
    tables = [read_hospital(path, missing) for path in FILES.obtain(root)]
    x, y = (np.concatenate(column) for column in zip(*tables, strict=True))
    groups = np.repeat(np.arange(len(HOSPITALS)), [len(labels) for _, labels in tables])
    test = np.concatenate([test_rows(labels) for _, labels in tables])
    x = standardise(x, groups, standardised, fit=~test).astype(np.float32)

    def arrays(part: np.ndarray) -> Arrays:
        return Arrays(torch.from_numpy(x[part]), torch.from_numpy(y[part]), 2, ("healthy", "diseased"))

    return Source(
        name="heart",
        train=arrays(~test),
        test=arrays(test),
        licence="CC BY 4.0",
        citation=bibtex("janosi1988heart, ogier2022flamby"),
        groups=groups[~test],
        groups_test=groups[test],
        group_names=HOSPITALS,
        settings={"missing": missing, "standardised": standardised, "features": list(FEATURES)},
    )


def read_hospital(path: Path, missing: str) -> tuple[np.ndarray, np.ndarray]:
    """Features float64 [n, 13] and labels int64 [n] of one hospital."""
    rows = [[number(cell, path) for cell in row] for row in read_table(path, header=False, width=14)]
    table = np.array([row[:10] + row[13:] for row in rows]).reshape(-1, 11)
    if np.isnan(table[:, -1]).any():
        raise DataError(f"{path} has a patient without a diagnosis.")
    unknown = np.isnan(table)
    if missing == "drop":
        table = table[~unknown.any(1)]
    else:
        for column in range(10):
            known_values = table[~unknown[:, column], column]
            fill = (
                (known_values.mean() if column not in KINDS else np.median(known_values)) if len(known_values) else 0.0
            )
            table[unknown[:, column], column] = fill
    indicators = []
    for column, (name, values) in KINDS.items():
        if not np.isin(table[:, column], values).all():
            raise DataError(f"{path} has a {name} other than {', '.join(map(str, values))}.")
        indicators += [table[:, column] == value for value in values[1:]]
    return np.column_stack([table[:, COLUMNS], *indicators]), (table[:, -1] > 0).astype(np.int64)


def test_rows(labels: np.ndarray) -> np.ndarray:
    """FLamby's split of one hospital: mask of its test patients, bool [n]."""
    train_test_split = import_extra("readers", "sklearn.model_selection", "data=heart").train_test_split
    stratified = labels if len(np.unique(labels)) > 1 and np.bincount(labels).min() > 2 else None
    mask = np.zeros(len(labels), bool)
    if len(labels) > 2:
        rows = np.arange(len(labels))
        _, tested = train_test_split(rows, test_size=1 - 0.66, train_size=0.66, random_state=43, stratify=stratified)
        mask[tested] = True
    return mask
