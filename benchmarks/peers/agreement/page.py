"""The page of a result: method × framework × digits, causes and changes, in Markdown."""

from __future__ import annotations

from typing import Any

from rows import ROWS, Row

AGREED = 12.0  # digits from which two implementations count as the same
NAMES = {"fluke": "fluke-fl", "flgo": "flgo", "fedlab": "FedLab", "flower": "Flower", "pfl": "pfl-research"}
PACKAGES = {"fluke": "fluke-fl", "flgo": "flgo", "fedlab": "fedlab", "flower": "flwr", "pfl": "pfl"}


def row_of(result: dict[str, Any]) -> Row:
    """The row of ``rows.py`` of a row of a result."""
    return next(row for row in ROWS if (row.method, row.peer) == (result["method"], result["peer"]))


def agrees(values: list[Any]) -> bool:
    """Whether all situations agree."""
    return all(isinstance(value, float) and value >= AGREED for value in values)


def unexplained(record: dict[str, Any]) -> list[str]:
    """Sentences about rows that are not as ``rows.py`` says."""
    wrong = []
    for result in record["rows"]:
        row, name = row_of(result), f"{result['method']} of {result['peer']}"
        if agrees(result["digits"]) and row.cause:
            wrong.append(f"{name} agrees, but rows.py has a cause of disagreement; remove it.")
        if not agrees(result["digits"]) and not row.cause:
            wrong.append(f"{name} disagrees ({result['digits']}), and rows.py names no cause.")
        if row.is_changed and not agrees(result["changed"]):
            wrong.append(f"{name} disagrees after the change, too ({result['changed']}).")
    return wrong


def digits_text(values: list[Any]) -> str:
    """Digits of the situations, like ``15`` or ``15, 3, 15, 3``."""
    if any(isinstance(value, str) for value in values):
        return "fails"
    texts = [f"{value:.0f}" for value in values]
    return (
        texts[0]
        if len({*texts}) == 1
        else f"{min(values):.0f} to {max(values):.0f}"
        if agrees(values)
        else ", ".join(texts)
    )


def table(record: dict[str, Any]) -> str:
    """All rows as a Markdown table."""
    lines = ["| method | framework | digits | cause of the difference | after this change | digits |", "|---" * 6 + "|"]
    for result in record["rows"]:
        row = row_of(result)
        sides = [f"there: {row.change}"] if row.change else []
        sides += [f"here: {', '.join(f'`{k}={v}`' for k, v in row.switch.items())}"] if row.switch else []
        cells = [
            row.method.replace(row.preset, f"`{row.preset}`", 1),
            NAMES[row.peer],
            digits_text(result["digits"]),
            row.cause,
        ]
        cells += [". ".join(sides), digits_text(result["changed"])] if sides else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    rows = record["rows"]
    same = sum(agrees(result["digits"]) for result in rows)
    after = sum(not agrees(r["digits"]) and bool(r["changed"]) and agrees(r["changed"]) for r in rows)
    methods = len({row_of(result).preset for result in rows})
    versions = [
        f"{NAMES[p]} {v[PACKAGES[p]]} (torch {v['torch']})" for p, v in record["versions"].items() if p in NAMES
    ]
    present = {(result["method"], result["peer"]) for result in rows}
    absent = [f"`{row.method}` of {NAMES[row.peer]}" for row in ROWS if (row.method, row.peer) not in present]
    rest = f" Not in this result: {', '.join(absent)}." if absent else ""
    situations, torch = "; ".join(record["situations"]), record["versions"]["fedloom"]["torch"]
    return f"""# Agreement with other frameworks

`{record["command"]}` runs one small federation through FedLoom and through the classes of other frameworks, each
installed from PyPI into an environment of its own: five clients with 6 to 15 samples, five rounds, float64, the same
first model, cohorts and mini-batches. The digits that agree are -log₁₀(max |Δ| / max |θ|), over the server's last model
and over what clients keep. Four numbers are for four situations: {situations}.
A single number or range is for all four.

Of {len(rows)} comparisons of {methods} methods, {same} agree to at least {AGREED:.0f} digits unchanged, and
{after} more after the named change; rounding alone leaves 14 to 16 digits. Settings that a framework has, such as
weights by samples, are the same on both sides. The causes are departures from the equations of the papers, or choices
that the papers leave open. No code of these frameworks is part of FedLoom. What they do was observed with the versions
below; others may differ.

{table(record)}

Run on {record["date"]}: FedLoom (torch {torch}), {", ".join(versions)}. The command ends with an error if a
difference is not explained in `benchmarks/peers/agreement/rows.py`, or an explained one does not occur.{rest}
"""
