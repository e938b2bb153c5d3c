"""What a stranger's run directory may hold: the page leaves out what is not what runs record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from helpers.pages import figures_of

from fedloom_apps.report import build
from fedloom_apps.report.groups import read
from fedloom_apps.report.runs import load

INF = float("inf")
RECORDS: list[dict[str, Any]] = [
    *({"global/reliability": rows} for rows in ("x", {"a": 1}, [[1, 2], [3]], [["a", "b", "c"]], [[1, 2, 3], None])),
    *({"failures": failures} for failures in (INF, 1e308)),
    *({f"lambda/{name}/accuracy/mean": 0.5} for name in (".", "1.2.3")),
]
CONFIGS: list[dict[str, Any]] = [
    *({"participation": rate} for rate in (INF, float("nan"))),
    *({"identity": {"federation": {"clients": 20, "unseen": unseen}}} for unseen in ("x", INF, [1])),
    *({"identity": {"method": {"mixing": f"AAggFFS(cdf='normal'{rest})"}}} for rest in ("", ", scale=x, shape=y")),
]
FAR = np.array([0, 2**64 - 1], "u8")
TABLES: list[tuple[str, dict[str, Any]]] = [
    *(("partition", {"client": ids, "label": [0, 1], "samples": [1, 1]}) for ids in ([0, 10**15], [-5, -7], FAR)),
    *(("mixing", {"round": [1, 1], "client": ids, "p": [0.5, 0.5]}) for ids in ([0, 10**15], [-1, -2])),
]


def rewrite(run: Path, **entries: Any) -> Path:
    """The run with these entries in every record."""
    records = [json.loads(line) | entries for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.mark.parametrize("entries", RECORDS, ids=str)
def test_records(entries: dict[str, Any], make_run, tmp_path: Path) -> None:
    build([rewrite(make_run(rounds=2), **entries)], tmp_path / "out")


@pytest.mark.parametrize("entries", CONFIGS, ids=str)
def test_settings(entries: dict[str, Any], make_run, tmp_path: Path) -> None:
    run = make_run(rounds=2, config=entries)
    table = {"round": [1, 1, 2, 2], "client": [0, 1, 0, 1], "p": [0.5, 0.5, 0.6, 0.4], "loss": [1.0, 2.0, 1.0, 1.0]}
    parquet.write_table(pa.table(table), run / "mixing.parquet")
    build([run], tmp_path / "out")


@pytest.mark.parametrize(("name", "columns"), TABLES, ids=str)
def test_tables(name: str, columns: dict[str, Any], make_run, tmp_path: Path) -> None:
    run = make_run(rounds=2)
    parquet.write_table(pa.table({key: np.asarray(values) for key, values in columns.items()}), run / f"{name}.parquet")
    build([run], tmp_path / "out")
    numbers = [int(client) for client in columns["client"]]
    usable = min(numbers) >= 0 and max(numbers) < 2**53
    assert ("has no usable numbers in the column client" in " ".join(load(run).notes)) != usable


@pytest.mark.parametrize(("accuracy", "drawn_at"), [("x", None), (None, None), ([1], None), (0.75, 0.75)])
def test_a_teachers_accuracy(accuracy: Any, drawn_at: float | None, make_run, tmp_path: Path) -> None:
    run = make_run(rounds=2, config={"evaluation": {"every": 2}})
    summary = json.loads((run / "summary.json").read_text()) | {"teacher": {"accuracy": accuracy}}
    (run / "summary.json").write_text(json.dumps(summary))
    (figure,) = (figure for figure in figures_of(build([run], tmp_path / "out")) if figure["name"] == "global_accuracy")
    assert figure["level"] == (None if drawn_at is None else ["teacher", drawn_at])


def test_a_partition_of_many_clients_shows_some_of_them(make_run, tmp_path: Path) -> None:
    """Each with its own numbers, as without the others."""
    run, clients = make_run(rounds=2), np.arange(1000)
    columns = {"client": np.repeat(clients, 2), "label": np.tile([0, 1], 1000), "samples": np.arange(2000)}
    parquet.write_table(pa.table(columns), run / "partition.parquet")
    (figure,) = (figure for figure in figures_of(build([run], tmp_path / "out")) if figure["name"] == "partition")
    sample = np.array(figure["columns"], int)
    assert len(sample) == 200
    assert figure["z"] == [(2 * sample).tolist(), (2 * sample + 1).tolist()]
    assert "200 of 1000 clients" in figure["caption"]
    assert read([run])[0].runs[0].training_clients == 20
