"""Readers of tables, on small sets in the original formats."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.base.errors import ConfigError, DataError
from fedloom.data import federate, sources
from fedloom_apps.online.streams import InOrder, task_stream
from fedloom_apps.readers.formats import read_table

pytestmark = pytest.mark.usefixtures("no_data_folder")


HEARTS = {
    "cleveland": [
        "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0",
        "67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2",
    ],
    "hungarian": [
        "28,1,2,130,132,0,2,185,0,0,?,?,?,0",
        "29,1,2,140,?,0,0,170,0,0,?,?,?,0",
        "40,0,3,130,215,0,1,138,0,0,?,?,?,1",
    ],
    "switzerland": ["32,1,1,95,0,0,0,127,0,.7,1,?,?,1", "34,1,4,115,0,0,?,154,0,.2,1,?,?,1"],
    "va": ["63,1,4,140,260,0,1,112,1,3,2,?,?,2", "44,1,4,130,209,0,1,127,0,0,?,?,?,0"],
}


def write_hearts(root: Path) -> None:
    (root / "heart").mkdir(exist_ok=True)
    for name, rows in HEARTS.items():
        (root / "heart" / f"processed.{name}.data").write_text("\n".join(rows) + "\n")


def test_heart_is_prepared_as_in_flamby(tmp_path: Path) -> None:
    write_hearts(tmp_path)
    source = sources.make("heart", root=str(tmp_path), standardised="none")
    assert (
        len(source.train) + len(source.test) == 7
    )  # one Hungarian without chol and one Swiss without restecg left out
    assert source.group_names == ("cleveland", "hungarian", "switzerland", "va")
    rows = {tuple(row) for row in torch.cat([source.train.x, source.test.x]).tolist()}
    numbers = [63.0, 1, 145, 233, 1, 150, 0]
    assert any(row[:7] == pytest.approx(numbers) and row[8:] == (0, 0, 0, 0, 1) for row in rows)
    assert len(sources.make("heart", root=str(tmp_path), missing="mean").train) >= len(source.train)
    with pytest.raises(ConfigError, match="missing is 'median'"):
        sources.make("heart", root=str(tmp_path), missing="median")
    path = tmp_path / "heart/processed.va.data"
    path.write_text(HEARTS["va"][0][:-4] + "\n")
    with pytest.raises(DataError, match="line 1: there are 12 cells, not 14"):
        sources.make("heart", root=str(tmp_path))
    path.write_text(HEARTS["va"][0].replace("140", "high") + "\n")
    with pytest.raises(DataError, match="'high' is not a number"):
        sources.make("heart", root=str(tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=r"expected heart/processed.va.data in .*archive.ics.uci.edu"):
        sources.make("heart", root=str(tmp_path))


def write_berka(root: Path) -> None:
    """Four loans in three regions, in the format of the challenge: quoted text, semicolons, days as yymmdd."""
    tables = {
        "loan": [
            '"loan_id";"account_id";"date";"amount";"duration";"payments";"status"',
            '5314;1;930705;96396;12;8033.00;"B"',
            '5316;2;930711;165960;36;4610.00;"A"',
            '6863;3;930728;127080;60;2118.00;"D"',
            '6864;4;940101;30276;12;2523.00;"C"',
        ],
        "account": [
            '"account_id";"district_id";"frequency";"date"',
            '1;1;"POPLATEK MESICNE";930101',
            '2;1;"POPLATEK TYDNE";930226',
            '3;2;"POPLATEK PO OBRATU";930707',
            '4;3;"POPLATEK MESICNE";931230',
            '5;3;"POPLATEK MESICNE";931230',
        ],
        "district": [
            "A1;A2;A3;A4;A5;A6;A7;A8;A9;A10;A11;A12;A13;A14;A15;A16",
            '1;"Hl.m. Praha";"Prague";1204953;0;0;0;1;1;100.0;12541;0.29;0.43;167;85677;99107',
            '2;"Benesov";"central Bohemia";88884;80;26;6;2;5;46.7;8507;?;1.85;132;?;2674',
            '3;"Decin";"north Bohemia";133777;24;25;2;4;10;84.7;8705;6.49;7.07;123;5198;6041',
        ],
        "order": [
            '"order_id";"account_id";"bank_to";"account_to";"amount";"k_symbol"',
            '29401;1;"YZ";"87144583";2452.00;"SIPO"',
            '29402;1;"ST";"89597016";3372.00;"UVER"',
            '29403;2;"QR";"13943797";7266.00;" "',
        ],
        "trans": [
            '"trans_id";"account_id";"date";"type";"operation";"amount";"balance";"k_symbol";"bank";"account"',
            '1;1;930101;"PRIJEM";"VKLAD";700.00;700.00;"";"";""',
            '2;1;930705;"PRIJEM";"PREVOD Z UCTU";300.00;1000.00;"DUCHOD";"YZ";"62457513"',
            '3;1;930706;"VYDAJ";"VYBER";900.00;100.00;"";;',
            '4;5;930801;"VYDAJ";"VYBER";900.00;100.00;"";;',
        ],
    }
    for name, rows in tables.items():
        (root / "berka").mkdir(exist_ok=True)
        (root / "berka" / f"{name}.asc").write_text("\r\n".join(rows) + "\r\n")


def test_berka_features(tmp_path: Path) -> None:
    write_berka(tmp_path)
    source = sources.make("berka", root=str(tmp_path), standardised="none")
    assert source.group_names == ("Prague", "central Bohemia")  # north Bohemia is left out
    assert source.groups.tolist() == [0, 0, 1]
    assert source.train.y.tolist() == [1, 0, 1]
    district, crimes = [1204953, 12541, 167, 0.36], (85677 + 99107) / 2
    first = [96396, 12, 8033, 185, *district, crimes, 2912, 2, 500, 850, 0, 0]
    torch.testing.assert_close(source.train.x[0], torch.tensor(first, dtype=torch.float32))
    third = [127080, 60, 2118, 21, 88884, 8507, 132, 1.85, 2674, 0, 0, 0, 0, 0, 1]
    torch.testing.assert_close(source.train.x[2], torch.tensor(third, dtype=torch.float32))
    late = sources.make("berka", root=str(tmp_path), standardised="none", hindsight=True)
    assert late.train.x[0, 10:13].tolist() == pytest.approx([3, 1900 / 3, 600])
    scaled = sources.make("berka", root=str(tmp_path))
    assert scaled.train.x[:2, 0].tolist() == [-1, 1]
    assert scaled.train.x[:, 13:].tolist() == source.train.x[:, 13:].tolist()
    assert sources.make("berka", root=str(tmp_path), regions=("north Bohemia",)).group_names == ("north Bohemia",)
    with pytest.raises(DataError, match="no loans in Bavaria"):
        sources.make("berka", root=str(tmp_path), regions=("Bavaria",))


def test_damaged_relational_tables_get_one_sentence(tmp_path: Path) -> None:
    write_berka(tmp_path)
    make = lambda: sources.make("berka", root=str(tmp_path))  # noqa: E731
    path = tmp_path / "berka/account.asc"
    text = path.read_text()
    path.write_text(text.replace("930226", "931326"))
    with pytest.raises(DataError, match="931326 is not a day"):
        make()
    path.write_text(text.replace("3;2;", "1e999;2;"))
    with pytest.raises(DataError, match="'1e999' is not a number"):
        make()
    path.write_text(text.replace("POPLATEK TYDNE", "DAILY"))
    with pytest.raises(DataError, match="account 2 has statements 'DAILY'"):
        make()
    path.write_text(text[: text.index("3;2")])
    with pytest.raises(DataError, match="the loan of account 3 has no account or no district"):
        make()
    path.write_text(text.replace("frequency", "often"))
    with pytest.raises(DataError, match=r"account.asc has no column frequency"):
        make()
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(DataError, match="is not a text table"):
        make()
    (tmp_path / "berka/trans.asc").unlink()
    with pytest.raises(DataError, match=r"expected berka/trans.asc in .*md5 88d00173"):
        make()


def test_tables_without_rows_and_with_a_mark_at_the_front(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfx,y\n1,2\n\n")
    assert list(read_table(tmp_path / "a.csv", ["y", "x"])) == [["2", "1"]]
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(DataError, match="it has nothing"):
        list(read_table(tmp_path / "b.csv", ["x"]))


VISITS = """when,ill,clinic,age,ward
2026-03-02,yes,b,40,x
2026-01-31,no,a,30,y
2026-02-01,yes,a,20,x
2026-02-01,no,b,10,y
"""


@pytest.mark.filterwarnings("ignore:.*with which models train poorly")  # they are only read
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_is_read_in_order_of_time(tmp_path: Path, kind: str) -> None:
    (tmp_path / "visits.csv").write_text(VISITS)
    path = tmp_path / f"visits.{kind}"
    if kind == "parquet":
        pd.read_csv(tmp_path / "visits.csv").to_parquet(path)
    source = sources.make("table", path=str(path), label="ill", client="clinic", time="when")
    assert source.train.names == ("no", "yes")
    assert source.train.x[:, 0].tolist() == [30, 20, 10, 40]  # the same day: as they were
    assert source.train.x.shape == (4, 3)  # age and the two wards; time is no input
    assert source.train.y.tolist() == [0, 1, 0, 1]
    assert source.groups is not None
    assert [source.group_names[g] for g in source.groups] == ["a", "a", "b", "b"]
    stream = task_stream(source, InOrder(train=1, test=1, by_client=True))
    assert [task.train.x[0, 0].item() for task in stream] == [30, 10]


@pytest.mark.filterwarnings("ignore:.*with which models train poorly")  # they are only read
@pytest.mark.parametrize(
    "date_format", ["{:%d.%m.%Y}", "{:%d/%m/%Y}", "{:%m/%d/%Y}", "{:%d-%m-%y}", "{:%Y-%m-%d}", "{:%d %b %Y %H:%M}"]
)
def test_a_hundred_days_in_a_row_are_sorted_however_dates_are_written(date_format: str, tmp_path: Path) -> None:
    days = pd.date_range("2026-01-25", periods=100)
    rows = np.random.default_rng(0).permutation(100)
    lines = [f"{n},{date_format.format(days[n])},{n % 2}" for n in rows]
    (tmp_path / "days.csv").write_text("\n".join(["n,day,label", *lines]))
    source = sources.make("table", path=str(tmp_path / "days.csv"), time="day", features=("n",))
    assert source.train.x[:, 0].tolist() == list(range(100))


def test_packed_tables_and_capital_endings(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "label": [0, 1]})
    frame.to_csv(tmp_path / "one.CSV", index=False)
    frame.to_csv(tmp_path / "two.csv.gz", index=False)
    frame.to_parquet(tmp_path / "three.csv.parquet")
    for name in ("one.CSV", "two.csv.gz", "three.csv.parquet"):
        assert sources.make("table", path=str(tmp_path / name)).train.x.tolist() == [[1], [2]]


def test_dates_that_may_begin_with_the_day_or_the_month_are_refused(tmp_path: Path) -> None:
    for days, sentence in (
        (["01/02/2026", "03/04/2026"], "dates like '01/02/2026', which may begin with the day or with the month"),
        (["13/01/2026", "01/13/2026"], "dates that begin with the day and others that begin with the month"),
    ):
        (tmp_path / "days.csv").write_text("\n".join(["n,day,label", *(f"{n},{d},{n}" for n, d in enumerate(days))]))
        with pytest.raises(DataError, match=re.escape(f"column 'day' holds {sentence}")):
            sources.make("table", path=str(tmp_path / "days.csv"), time="day")


def test_what_is_no_table_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text(VISITS.replace("2026-01-31", ""))
    for settings, sentence in (
        ({}, "has no column 'label'; name the target with label= (data.label= on the command line)"),
        ({"label": "sick"}, "has no column 'sick'"),
        ({"label": ["ill", "sick"]}, "has no column 'sick'"),
        ({"label": []}, "data.label names no column"),
        (
            {"label": ["ill", "age"], "features": ["age", "ward"]},
            "column 'age' is an input and also the label or client; leave it out of data.features",
        ),
        ({"label": "ill", "time": "ill"}, "data.time names the column of labels or clients, 'ill'; choose another"),
        ({"label": "ill", "time": "day"}, "visits has no column 'day'"),
        ({"label": "ill", "time": "ward"}, "'ward' holds neither numbers nor dates"),
        ({"label": "ill", "time": "when"}, "has missing values in 1 of"),
        ({"label": "ill", "client": "site"}, "has no column 'site'"),
        ({"label": "ill", "path": "none.csv"}, "there is no file none.csv"),
        ({"label": "ill", "path": str(tmp_path), "test": str(tmp_path / "home")}, "there is no file"),
    ):
        with pytest.raises(DataError, match=re.escape(sentence)) as refused:
            sources.make("table", **{"path": str(path), **settings})
        assert "\n" not in str(refused.value)


def write_hospitals(folder: Path) -> Path:
    folder.mkdir()
    (folder / "north.csv").write_text("age,ward,ill\n0.6,a,1\n0.3,b,0\n")
    (folder / "South.CSV").write_text("ill,age,ward\n0,0.4,c\n1,0.2,a\n0,0.5,b\n")
    (folder / "notes.txt").write_text("not a table")
    return folder


def test_a_folder_of_tables_is_one_table_with_a_column_of_clients(tmp_path: Path) -> None:
    folder = write_hospitals(tmp_path / "hospitals")
    (tmp_path / "all.csv").write_text(
        "site,age,ward,ill\nSouth,0.4,c,0\nSouth,0.2,a,1\nSouth,0.5,b,0\nnorth,0.6,a,1\nnorth,0.3,b,0\n"
    )
    from_folder = sources.make("table", path=str(folder), label=("ill",), test=str(folder))
    from_file = sources.make("table", path=str(tmp_path / "all.csv"), label=("ill",), client="site")
    assert from_folder.group_names == from_file.group_names == ("South", "north")
    assert (
        from_folder.groups.tolist() == from_file.groups.tolist() == from_folder.groups_test.tolist() == [0, 0, 0, 1, 1]
    )
    assert torch.equal(from_folder.train.x, from_file.train.x)
    assert torch.equal(from_folder.train.y, from_file.train.y)
    by_ward = sources.make("table", path=str(folder), label=("ill",), client="ward")
    assert by_ward.group_names == ("a", "b", "c")
    (tmp_path / "words").mkdir()
    (tmp_path / "words/ann.csv").write_text("note,label\ngood morning,1\n")
    (tmp_path / "words/bob.csv").write_text("note,label\ngood night,0\n")
    texts = sources.make("text", path=str(tmp_path / "words"), text="note")
    assert texts.group_names == ("ann", "bob")


def test_a_table_without_rows_does_not_change_the_types_of_the_others(tmp_path: Path) -> None:
    folder = write_hospitals(tmp_path / "hospitals")
    (folder / "west.csv").write_text("age,ward,ill\n")
    (folder / "._north.csv").write_bytes(b"\x00\x05\x16\x07")  # which macOS writes beside files
    with pytest.warns(UserWarning, match="of the tables in .*hospitals, west have no rows"):
        source = sources.make("table", path=str(folder), label=("ill",))
    assert source.group_names == ("South", "north")
    assert source.train.x[:, 0].tolist() == pytest.approx([0.4, 0.2, 0.5, 0.6, 0.3])


def test_tables_of_a_folder_have_the_same_columns(tmp_path: Path) -> None:
    folder = write_hospitals(tmp_path / "hospitals")
    with pytest.raises(ConfigError, match="is a folder, not a data source; to read it, write table:"):
        sources[str(folder)]
    (folder / "north.csv.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"north\.csv and north\.csv\.gz in .* have the same name"):
        sources.make("table", path=str(folder), label=("ill",))
    (folder / "north.csv.gz").unlink()
    (folder / "west.csv").write_text("age,ill,client\n30,1,x\n")
    with pytest.raises(DataError, match="South and west differ in the columns client, ward"):
        sources.make("table", path=str(folder), label=("ill",))
    for name in ("north.csv", "South.CSV"):
        (folder / name).unlink()
    with pytest.raises(DataError, match="have a column 'client': name it, data"):
        sources.make("table", path=str(folder), label=("ill",))
    (folder / "west.csv").unlink()
    with pytest.raises(DataError, match="hospitals holds no tables"):
        sources.make("table", path=str(folder), label=("ill",))


def test_a_file_of_another_kind_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("visits.tsv").write_text("a\till\n1\t0\n")
    with pytest.raises(ConfigError, match=r"'visits\.tsv' is a file of a kind that no data source reads; write it as"):
        sources["visits.tsv"]
    for name in ("packed/visits.csv.gz", "packed"):
        Path("packed").mkdir(exist_ok=True)
        Path("packed/visits.csv.gz").touch()
        with pytest.raises(ConfigError, match=f"'{name}' is a (file|folder), .*; to read it, write table:{name}"):
            sources[name]
    with pytest.raises(DataError, match=r"visits\.tsv ends in neither \.csv nor \.parquet; write the table in one"):
        sources.make("table", path="visits.tsv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a;ill\n1,5;no\n2,5;yes\n", "separates its columns by semicolons; write it with commas, and with points"),
        (b"a\till\n1.5\tno\n2.5\tyes\n", "separates its columns by tabs; write it with commas"),
        ("a,ill\n1.5,n\u00e9\n2.5,yes\n".encode("latin-1"), "is not encoded in UTF-8; write it in that encoding"),
    ],
)
def test_a_table_in_another_format_is_refused_with_what_to_do(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "own.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        sources.make("table", path=str(tmp_path / "own.csv"), label=("ill",))


@pytest.mark.filterwarnings("ignore:days. column 'day' has mean")
def test_clients_of_a_table_in_time_are_tested_on_their_last_rows(tmp_path: Path) -> None:
    rows = [f"{39 - k},{'ab'[k % 2]},{k % 3 > 0:d}" for k in range(40)]
    (tmp_path / "days.csv").write_text("\n".join(["day,who,label", *rows]))
    source = sources.make("table", path=str(tmp_path / "days.csv"), time="day", features=("day",), client="who")
    federation = federate(source, validation=0.1, held_out=0.2)
    for client in range(2):
        days = [
            split.client(client).x[:, 0].tolist()
            for split in (federation.train, federation.validation, federation.held_out)
        ]
        assert [len(part) for part in days] == [14, 2, 4]
        assert max(days[0]) < min(days[1])
        assert max(days[1]) < min(days[2])
