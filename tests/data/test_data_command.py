"""``fedloom data``: which data sets are available, which are missing, and what they contain."""

from pathlib import Path

import numpy as np
import pytest

from fedloom.cli import main
from fedloom.data import sources
from fedloom.data.sources.files import files_of


@pytest.fixture(autouse=True)
def only_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write_emnist_l(folder: Path) -> None:
    x, y = np.zeros((40, 28, 28), np.uint8), np.arange(40) % 10
    np.savez(folder / "emnist_l.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])


def test_every_source_says_what_it_reads() -> None:
    without = {
        "digits",
        "folder",
        "generated",
        "hub",
        "intervals",
        "npz",
        "six_gaussians",
        "synthetic",
        "table",
        "text",
    }
    read = {entry.name: files for entry in sources if (files := files_of(entry))}
    assert {entry.name for entry in sources} - read.keys() == without
    for files in read.values():
        assert files.origin.startswith(("http", "ImageNet"))
        sentence = files.missing()
        assert files.title in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_the_overview(only_this_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_emnist_l(only_this_folder)
    assert main(["data"]) == 0
    output = capsys.readouterr().out
    lines = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert set(sources.names()) <= set(lines)
    assert "always" in lines["digits"]
    assert "yes" in lines["emnist_l"]
    assert "40.6 kB" in lines["emnist_l"]
    assert "expected: CINIC-10/train/ and valid/ and test/" in lines["cinic10"]
    assert str(only_this_folder) in output


def test_one_data_set_with_pictures(only_this_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_emnist_l(only_this_folder)
    out = only_this_folder / "pictures" / "letters.png"
    assert main(["data", "emnist_l", "clients=4", "partition=iid", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    for words in ("licence: public domain", "1 × 28 × 28", "10 classes", "mean 10 ", "letters-clients.png"):
        assert words in output
    assert out.stat().st_size > 1000
    assert (out.parent / "letters-clients.png").stat().st_size > 1000


def test_classes_with_names_are_told_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{k % 7},{('setosa', 'versicolor')[k % 2]}" for k in range(40)]
    (tmp_path / "iris.csv").write_text("\n".join(["a,kind", *rows]))
    words = ["data.label=kind", "partition=iid", "clients=2"]
    assert main(["data", f"table:{tmp_path / 'iris.csv'}", *words]) == 0
    assert "classes: 0 setosa, 1 versicolor" in capsys.readouterr().out


def test_natural_clients_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "synthetic", "data.clients=7"]) == 0
    output = capsys.readouterr().out
    assert "natural" in output
    assert "1,400" in output
    assert main(["data", "synthetic", "partition=iid", "clients=5"]) == 0
    assert "mean 800 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mnits"], "did you mean 'mnist'"),
        (["data=mnist"], "takes the name of a data set first"),
        (["mnist"], "MNIST is missing: expected MNIST/raw/train-images-idx3-ubyte"),
        (["npz"], "needs a value for 'path'"),
        (["digits", "--out", "a.gif"], "has no known format"),
        (["digits", "out=a.gif"], "has no known format"),
        (["--out", "a.png"], "needs the name of a data set"),
        (["digits", "data.size=3"], "has no setting 'size'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
