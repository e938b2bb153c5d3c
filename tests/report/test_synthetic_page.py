"""Synthetic sets on the page: a table, curves and pictures; nothing if there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fedloom_apps.report import build
from fedloom_apps.report.comparisons import paired_table
from fedloom_apps.report.groups import read
from fedloom_apps.report.page import PNG, synthetic_images
from fedloom_apps.report.tables import final_tables, headline, synthetic_table

Maker = Callable[..., Path]


def add_judgement(path: Path, accuracy: float) -> Path:
    """Add what a judge says to a run's records, every fourth round, and a picture."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["round"] % 4 == 0:
            record |= {"synthetic/accuracy": accuracy * record["round"] / 12}
            record |= {"synthetic/fid": 9.0, "synthetic/copies": 0.0}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "figures").mkdir()
    for name in ("synthetic.png", "real.png"):
        Image.new("L", (4, 4)).save(path / "figures" / name)
    return path


def test_sets_have_a_table_curves_and_pictures(make_run: Maker, tmp_path: Path) -> None:
    runs = [add_judgement(make_run(method="fedevg", seed=seed), 0.5 + 0.1 * seed) for seed in (1, 2)]
    plain = make_run(method="fedavg")
    groups = read([*runs, plain])
    table = synthetic_table(groups)
    assert table is not None
    assert [name for name, *_ in table.rows] == ["fedevg"]
    assert [column.title for column in table.columns] == ["accuracy, %", "FID", "copies, %", "best accuracy, %"]
    (losses,) = (table for table in final_tables(groups) if table.name == "final_train")
    assert losses.names == ["fedavg"]  # an energy has no best round
    assert table.rows[0][2][0].text.startswith("65.00")
    assert [image.heading for image in synthetic_images(groups)] == ["Real", "fedevg"]
    page = build([*runs, plain], tmp_path / "page").read_text()
    assert page.count("One row per class") + page.count("one row per class") >= 2
    assert "FID of the synthetic set" in page
    assert "Synthetic sets" in (tmp_path / "page" / "tables.tex").read_text()


def test_sets_are_compared_by_what_is_learnt_from_them_and_never_by_an_energy(make_run: Maker) -> None:
    runs = {name: [add_judgement(make_run(method=name, seed=seed), a + 0.1 * seed) for seed in (1, 2)]
            for name, a in (("fedevg", 0.5), ("fedcvae", 0.3))}  # fmt: skip
    table = paired_table(read([*runs["fedevg"], *runs["fedcvae"]]))
    assert table is not None
    assert "Classifier trained on the synthetic set" in table.caption
    assert table.rows[0][2][1].text.startswith("-20.00")
    assert (headline(read([*runs["fedevg"], make_run(method="fedavg")])) or ("",))[0] != "train/loss"


def test_without_sets_the_page_says_nothing_of_them(make_run: Maker, tmp_path: Path) -> None:
    groups = read([make_run()])
    assert synthetic_table(groups) is None
    assert list(synthetic_images(groups)) == []
    assert "Synthetic" not in build([groups[0].runs[0].path], tmp_path / "page").read_text()


@pytest.mark.parametrize("missing", ["real.png", "synthetic.png"])
def test_a_picture_that_is_missing_is_left_out(make_run: Maker, missing: str) -> None:
    run = add_judgement(make_run(method="fedevg"), 0.5)
    (run / "figures" / missing).unlink()
    headings = [picture.heading for picture in synthetic_images(read([run]))]
    assert headings == ([] if missing == "synthetic.png" else ["fedevg"])


def test_only_pictures_of_the_run_are_embedded(make_run: Maker, tmp_path: Path) -> None:
    run = make_run(rounds=2)
    (run / "figures").mkdir()
    secret, picture = tmp_path / "secret.png", run / "figures" / "synthetic.png"
    for content in (b"a private key", PNG + b"another's picture"):
        secret.write_bytes(content)
        picture.symlink_to(secret)
        assert not list(synthetic_images(read([run])))
        picture.unlink()
    picture.write_bytes(b"a private key")
    assert not list(synthetic_images(read([run])))
    picture.write_bytes(PNG + b"its own")
    assert [image.content for image in synthetic_images(read([run]))] == [PNG + b"its own"]
