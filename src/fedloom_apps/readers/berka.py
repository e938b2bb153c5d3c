"""Berka: loan defaults at a Czech bank, by region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import DataError
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.files import Files, reads
from fedloom_apps.readers.formats import Standardise, number, read_table, standardise

TABLES = ("loan", "account", "district", "order", "trans")
FILES = Files(
    "Berka",
    (tuple(f"berka/{table}.asc" for table in TABLES),),
    "http://sorry.vse.cz/~berka/challenge/pkdd1999",
    {"data_berka.zip": "md5 88d001738478c5e348a0896878f2433c"},
)
FEATURES = (
    "loan amount", "loan duration", "monthly payment", "days from account to loan", "inhabitants of the district",
    "average salary", "entrepreneurs per 1000", "unemployment rate", "crimes", "average permanent order",
    "transactions", "average transaction", "average balance", "weekly statements", "statements after transactions",
)  # fmt: skip
STATEMENTS = ("POPLATEK MESICNE", "POPLATEK TYDNE", "POPLATEK PO OBRATU")  # monthly, weekly, after a transaction
REPAID = {"A": 0, "C": 0, "B": 1, "D": 1}  # finished or running; B, D: not paid, in debt
LEFT_OUT = "north Bohemia"


@sources.register
@reads(FILES)
def berka(
    hindsight: bool = False,
    regions: tuple[str, ...] = (),
    standardised: Standardise = "client",
    root: str | Path | None = None,
) -> Source:
    """Berka (PKDD'99): loan default from 15 features, by region.

    Reads five of the eight relational tables, ``berka/{loan,account,district,order,trans}.asc``. A sample is one of 682
    loans; class 1 is a loan that was not repaid or is in debt (status B, D). Clients are the regions of the accounts'
    districts, without North Bohemia, where only one loan failed: 621 loans at 7 clients. There is no common test set: a
    client's own test loans are a fraction of its loans (``held_out``).

    Hahn (2024) uses 15 features without listing them; these are those of his public code: amount, duration and monthly
    payment of the loan; days between the opening of the account and the loan; inhabitants, average salary,
    entrepreneurs, unemployment and crimes of the district (means over the known years); the mean permanent order (0
    without any); number and mean amount of transactions, and mean balance; and two indicators of how often statements
    are sent. The 13 numbers are standardised within each region, over all of its loans.

    That code uses all transactions of the account, even those after the loan was granted, which reveal the outcome.
    Here only transactions up to the day of the loan count, unless ``hindsight``.

    Args:
        hindsight: whether transactions after the loan count too (as published).
        regions: the regions to keep; by default all but North Bohemia.
        standardised: whether features are standardised per ``client``, ``pooled``, or not (``none``).
    """
    loans, accounts, districts, orders, transactions = FILES.obtain(root)
    rows = {int(row[0]): row for row in numbers_of(loans, ["account_id", "date", "amount", "duration", "payments"], 5)}
    account_rows = {
        int(row[0]): row for row in numbers_of(accounts, ["account_id", "district_id", "date", "frequency"], 3)
    }
    columns = ["A1", "A3", "A4", "A11", "A12", "A13", "A14", "A15", "A16"]
    where = {int(row[0]): row for row in numbers_of(districts, columns, 1, text=1)}
    status = {int(a): s for a, s in numbers_of(loans, ["account_id", "status"], 0, text=1)}
    sums = {account: np.zeros(5) for account in rows}  # orders, their sum, transactions, their sum, sum of balances
    for account, amount in numbers_of(orders, ["account_id", "amount"], 2):
        if int(account) in sums:
            sums[int(account)][:2] += 1, amount
    for account, day, amount, balance in numbers_of(transactions, ["account_id", "date", "amount", "balance"], 4):
        if int(account) in sums and (hindsight or day <= rows[int(account)][1]):
            sums[int(account)][2:] += 1, amount, balance

    x, y, names = [], [], []
    for account, (_, granted, *loan) in rows.items():
        if account not in account_rows or int(account_rows[account][1]) not in where:
            raise DataError(f"the loan of account {account} has no account or no district in {accounts.parent}.")
        _, district, opening_day, frequency = account_rows[account]
        _, region, inhabitants, salary, jobless1, jobless2, founders, crimes1, crimes2 = where[int(district)]
        if region not in (regions or (region,)) or (region == LEFT_OUT and not regions):
            continue
        if frequency not in STATEMENTS or status[account] not in REPAID:
            raise DataError(f"account {account} has statements {frequency!r} and loan status {status[account]!r}.")
        n_orders, ordered, n, moved, balances = sums[account]
        rates = [mean_known(jobless1, jobless2), mean_known(crimes1, crimes2)]
        history = [ordered / max(n_orders, 1), n, moved / max(n, 1), balances / max(n, 1)]
        about = [(day_of(granted) - day_of(opening_day)).days, inhabitants, salary, founders, *rates, *history]
        x.append([*loan, *about, *(frequency == word for word in STATEMENTS[1:])])
        y.append(REPAID[status[account]])
        names.append(region)
    if not x:
        raise DataError(f"{loans} has no loans in {', '.join(regions) or 'any region'}.")
    clients = natural_clients(names)
    features = standardise(np.array(x, dtype=np.float64), clients["groups"], standardised, columns=slice(0, 13)).astype(
        np.float32
    )
    train = Arrays(torch.from_numpy(features), torch.tensor(y), 2, ("repaid", "failed"))
    settings = {"hindsight": hindsight, "regions": list(regions), "standardised": standardised}
    return Source(
        name="berka",
        train=train,
        test=train.take(np.zeros(0, np.int64)),
        licence="not stated by the authors (PKDD'99 discovery challenge)",
        citation=bibtex("berka1999workshop"),
        **clients,
        settings={**settings, "features": list(FEATURES)},
    )


def numbers_of(path: Path, columns: Sequence[str], complete: int, text: int | None = None) -> Iterator[list]:
    """Rows of a table as numbers, except column ``text`` and ``frequency``; the first ``complete`` must not be NaN."""
    as_text = {text, columns.index("frequency") if "frequency" in columns else None}
    for row in read_table(path, columns, separator=";"):
        values = [cell.strip() if k in as_text else number(cell, path) for k, cell in enumerate(row)]
        if any(isinstance(value, float) and np.isnan(value) for value in values[: max(complete, 1)]):
            raise DataError(f"{path} has a row in which {', '.join(columns[:complete])} is unknown: {'; '.join(row)}.")
        yield values


def mean_known(*values: float) -> float:
    """The mean of the values that are not NaN; 0 if there are none.

    >>> mean_known(float("nan"), 3.0), mean_known(1.0, 3.0)
    (3.0, 2.0)
    """
    numbers = [value for value in values if not np.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else 0.0


def day_of(number: float) -> date:
    """The date of a number yymmdd.

    >>> day_of(930705)
    datetime.date(1993, 7, 5)
    """
    digits = f"{int(number):06}"
    try:
        return date(1900 + int(digits[:2]), int(digits[2:4]), int(digits[4:]))
    except ValueError:
        raise DataError(f"{digits} is not a day (yymmdd).") from None
