"""A table of short texts by several users."""

from __future__ import annotations

import numpy as np
import pandas as pd

GOOD, BAD, NEITHER = (
    ["good", "great", "lovely", "fine"],
    ["bad", "awful", "poor", "dull"],
    ["the", "film", "was", "long", "and", "we", "saw", "it"],
)


def reviews(rows: int = 300) -> pd.DataFrame:
    """Sentences that two of their words tell to be of one class or the other, by several users."""
    draw = np.random.default_rng(0)
    table = []
    for _ in range(rows):
        good = bool(draw.integers(2))
        words = [*draw.choice(NEITHER, 4), *draw.choice(GOOD if good else BAD, 2)]
        table.append((" ".join(draw.permutation(words)), "yes" if good else "no", f"user {draw.integers(3)}"))
    return pd.DataFrame(table, columns=["review", "said", "user"])
