"""Files of strangers: nothing is written through a link, nothing endless is read, no table one column off."""

import gzip
import io
import os
import platform
import struct
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.commands import Cli, cli
from pandas.io.common import get_handle
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from fedloom.base import files
from fedloom.base.errors import DataError
from fedloom.data import plots, sources
from fedloom.data.like import read_like
from fedloom.data.sources.arrays import read_image
from fedloom.data.sources.files import cached, read_npz, write_npz
from fedloom.data.sources.generated import read_generated
from fedloom.data.sources.table import read_frame, without_gaps
from fedloom.data.user import as_source
from fedloom.experiment.rundir import Table
from fedloom_apps.readers.formats import read_idx, read_pickle, read_table

__all__ = ["cli"]


def images(folder: Path, *classes: str) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for shade in (0, 200):
            Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(folder / name / f"{shade}.png")
    return folder


def _npz(folder: Path) -> None:
    write_npz(folder / "x.npz", x=np.zeros(2))


def _cache(folder: Path) -> None:
    cached(folder / ".fedloom-images.npz", "stamp", lambda: np.zeros(2))


def _folder(folder: Path) -> None:
    sources.make("folder", path=str(folder / "images"), size=4)


def _picture(folder: Path) -> None:
    plots.save(plots.Figure(), folder / "plot.png", 50)


@pytest.mark.parametrize("write", [_npz, _cache, _folder, _picture])
def test_what_is_written_never_goes_through_a_link(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Every name at which a first write leaves a file is a link to a file of somebody's before the second."""
    first, second, victim = tmp_path / "first", tmp_path / "second", tmp_path / "victim"
    victim.write_text("precious")
    for home in (first, second):
        home.mkdir()
        images(home / "images", "a")
        for path in (home / "images" / "a").iterdir():
            os.utime(path, (0, 0))  # the name of a folder's cache depends on it
    write(first)
    names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    new_files = [name for name in names if not (second / name).exists()]
    assert new_files
    for name in new_files:
        part = f".{name.name}.{platform.node()}-{os.getpid()}.part"
        (second / name).with_name(part).symlink_to(victim)
    write(second)
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in second.rglob("*.part")) == []
    assert all((second / name).read_bytes()[:4] == (first / name).read_bytes()[:4] for name in new_files)


def test_a_mapped_file_holds_what_numpy_reads(tmp_path: Path) -> None:
    with files.whole_file(tmp_path / "x.npy") as file:
        array = files.memory_map(file, np.float32, (3, 2))
        array[:] = np.arange(6).reshape(3, 2)
        array.flush()
    assert np.load(tmp_path / "x.npy", mmap_mode="r").tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve room")
def test_a_mapped_file_has_its_room_before_it_is_written_into(tmp_path: Path) -> None:
    """A write into a hole for which a full disk has no room would end the process, by a signal."""
    with files.new_file(tmp_path / "x.npy") as file:
        files.memory_map(file, np.float32, (1 << 20,))
        assert os.fstat(file.fileno()).st_blocks * 512 >= 4 << 20


READERS: dict[str, Callable[[Path], Any]] = {
    "x.npz": lambda path: read_npz(path, ["x"]),
    "x.idx": read_idx,
    "x.pickle": lambda path: read_pickle(path, []),
    "x.txt": lambda path: list(read_table(path)),
    "x.csv": read_frame,
    "x.parquet": read_frame,
    "x.png": lambda path: read_image(path, 4),
    "set.parquet": read_generated,
    "x.npy": lambda path: read_like(path, {}),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("endless", ["pipe", "device"])
def test_a_pipe_or_a_device_is_refused_before_it_is_read(name: str, endless: str, tmp_path: Path) -> None:
    if endless == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is a pipe, a socket or a device, whose end is not known"):
        READERS[name](tmp_path / name)


def test_what_unpacks_to_more_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1000, 1000)), y=np.zeros(1))
    with gzip.open(tmp_path / "x.idx.gz", "wb") as file:
        file.write(struct.pack(">BBBBI", 0, 0, 8, 1, 2_000_000) + bytes(2_000_000))
    pq.write_table(pa.table({"x": np.zeros(200_000), "label": np.zeros(200_000)}), tmp_path / "x.parquet")
    pq.write_table(pa.table({"x": [np.zeros(200_000)], "label": [0]}), tmp_path / "lists.parquet")
    monkeypatch.setattr(files, "memory", lambda: 1e6)
    for read in (
        lambda p: read_npz(p / "x.npz", ["x"]),
        lambda p: read_like(p / "x.npz", {}),
        lambda p: read_idx(p / "x.idx.gz"),
        lambda p: read_frame(p / "x.parquet"),
        lambda p: read_frame(p / "lists.parquet"),
        lambda p: read_generated(p / "lists.parquet"),
        lambda p: Table(p / "x.parquet").read(),
    ):
        with pytest.raises(DataError, match=r"unpacked needs 0\.0 GB of memory, but there are 0\.0 GB"):
            read(tmp_path)
    assert list(read_npz(tmp_path / "x.npz", ["y"])) == ["y"]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(100_000)])
def test_a_text_that_a_parquet_file_holds_once_counts_each_time(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pa.array(["x" * 100_000] * 1000, pa.string()).cast(pa.binary()).cast(kind)
    pq.write_table(pa.table({"x": texts, "label": np.zeros(1000)}), path := tmp_path / "x.parquet")
    assert path.stat().st_size < 2e5
    monkeypatch.setattr(files, "memory", lambda: 5e7)
    for read in (read_frame, read_generated):
        with pytest.raises(DataError, match=r"unpacked needs 0\.1 GB of memory, but there are 0\.1 GB"):
            read(path)


def test_categories_that_a_parquet_file_holds_once_a_group_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = pa.array([f"a long name of a town, number {town:06d}" for town in range(2000)])
    towns = pa.DictionaryArray.from_arrays(np.arange(10_000) % 2000, names)
    table = pa.table({"x": towns, "label": np.arange(10_000) % 2})
    pq.write_table(table, path := tmp_path / "x.parquet", row_group_size=5000)
    monkeypatch.setattr(files, "memory", lambda: 2e6)
    assert len(read_frame(path)) == 10_000
    monkeypatch.setattr(files, "memory", lambda: 3e5)
    with pytest.raises(DataError, match="unpacked needs"):
        read_frame(path)


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zip"])
def test_a_csv_file_that_unpacks_to_more_than_memory_is_refused_while_it_is_read(
    packed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100,000 rows of two cells, four bytes each, none is a number of which there would be too many."""
    path, sizes = tmp_path / f"t.csv{packed}", list[float]()
    with get_handle(path, "wb", compression="infer", is_text=False) as file:
        file.handle.write(b"x,y\n" + 100_000 * b"0,1\n")  # pyright: ignore[reportArgumentType]
    assert len(read_frame(path)) == 100_000
    check = files.check_memory
    table = import_module("fedloom.data.sources.table")
    monkeypatch.setattr(table, "check_memory", lambda title, size: (sizes.append(size), check(title, size)))
    monkeypatch.setattr(files, "memory", lambda: 1e6)
    with pytest.raises(DataError, match=r"t\.csv.* unpacked needs 0\.0 GB of memory, but there are 0\.0 GB"):
        read_frame(path)
    assert max(sizes) == sizes[-1] < 1.6e6  # two numbers of eight bytes a row, of which a piece has 65,536


def npy(kind: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """An npy file of any header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "shape", "data", "sentence"),
    [
        ("x_train", "<f4", (10**7, 0), b"", "10,000,000 rows hold nothing"),
        ("names", "<U0", (10**7,), b"", "10,000,000 rows hold nothing"),
        ("client_train", ">U1", (4,), b"\x7f\xff\xff\xff" * 4, "its texts are no Unicode"),
        ("names", "<U1", (2,), b"a\0\0\0\0\xd8\0\0", "its texts are no Unicode"),
    ],
)
def test_rows_of_a_header_alone_and_texts_that_are_none(
    name: str, kind: str, shape: tuple[int, ...], data: bytes, sentence: str, folder: bool, tmp_path: Path
) -> None:
    arrays = {"x_train": npy("<f4", (4, 3), bytes(48)), "y_train": npy("<i8", (4,), np.arange(4).tobytes())}
    arrays[name] = npy(kind, shape, data)
    path = tmp_path / ("data" if folder else "data.npz")
    if folder:
        path.mkdir()
        for key, blob in arrays.items():
            (path / f"{key}.npy").write_bytes(blob)
    else:
        with ZipFile(path, "w") as file:
            for key, blob in arrays.items():
                file.writestr(f"{key}.npy", blob)
    with pytest.raises(DataError, match=sentence):
        sources.make("npz", path=str(path))


def test_texts_of_a_parquet_file_that_are_none(tmp_path: Path) -> None:
    ends, x = pa.py_buffer(np.arange(3, dtype=np.int32)), np.zeros(2)
    for kind, sentence in ((pa.string(), "cannot be read as a table"), (pa.binary(), "holds a bytes in a cell")):
        texts = pa.Array.from_buffers(kind, 2, [None, ends, pa.py_buffer(b"\xff\xfe")])
        pq.write_table(pa.table({"x": texts, "z": x, "label": [0, 1]}), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=sentence):
            sources.make("table", path=str(tmp_path / "t.parquet"))


def test_memory_that_ends_while_a_file_is_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> None:
        raise MemoryError("Unable to allocate 8 GiB")

    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", full)
    for read in (lambda p: read_npz(p, ["x"]), lambda p: read_like(p, {})):
        with pytest.raises(MemoryError):
            read(tmp_path / "x.npz")


def test_memory_of_the_cpu_that_does_not_suffice_is_one_sentence(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*args: Any) -> None:
        torch.empty(2**50)

    monkeypatch.setattr("fedloom.experiment.evaluator.Evaluator.deployed", hungry)
    answer = cli("run", "method=fedavg", "model=logistic", "clients=2", "rounds=1")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith(
        "fedloom: there is not enough memory (can't allocate memory: you tried"
    )


@pytest.mark.parametrize("size", ["4611686018427387904", "400000000"])
def test_a_model_larger_than_memory_is_refused_before_it_is_made(
    size: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory", lambda: 1e10)
    answer = cli("run", "method=fedavg", "model=mlp", f"model.hidden=[{size}]", "--dry-run")
    assert (answer.code, answer.out) == (2, "")
    assert "smaller sizes" in answer.err.splitlines()[-1]


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("key", ["local.lr", "rounds", "seed", "clients", "partition.alpha", "model.hidden"])
def test_a_number_of_hundreds_of_digits_is_one_sentence(key: str, digits: int, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{key}: {'1' * digits}\npartition: dirichlet\nmodel: mlp\n")
    for words in (("recipe.yaml",), ("partition=dirichlet", "model=mlp", f"{key}={'1' * digits}")):
        answer = cli("run", *words, "--dry-run")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.splitlines()[-1].startswith("fedloom: ")


def csv(tmp_path: Path, text: str) -> Path:
    (tmp_path / "table.csv").write_text(text)
    return tmp_path / "table.csv"


@pytest.mark.parametrize("end", ["9", "x"])
def test_rows_with_a_value_more_than_the_header_are_not_read_one_column_off(end: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more values in a row than the 3 names in its header"):
        read_frame(csv(tmp_path, f"a,b,label\n1,2,0,{end}\n3,4,1,{end}\n"))


def test_commas_at_the_ends_of_rows_are_no_values(tmp_path: Path) -> None:
    frame = read_frame(csv(tmp_path, "a,b,label\n1,2,0,\n3,4,1,\n"))
    assert frame.to_dict("list") == {"a": [1, 3], "b": [2, 4], "label": [0, 1]}


@pytest.mark.parametrize("packed", [".csv", ".csv.gz", ".csv.xz", ".csv.zip"])
def test_a_name_that_two_columns_have_is_refused(packed: str, tmp_path: Path) -> None:
    frame = pd.DataFrame([[0, 1, 1], [1, 2, 0]], columns=pd.Index(["y", "a", "y"]))
    frame.to_csv(tmp_path / f"t{packed}", index=False)
    with pytest.raises(DataError, match="several columns named 'y'; rename them"):
        sources.make("table", path=str(tmp_path / f"t{packed}"), label="y")
    with pytest.raises(DataError, match="several columns named 'y'; rename them"):
        as_source(frame, label="y")


def test_two_columns_of_a_parquet_file_with_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array([1])] * 3, names=["y", "a", "y"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="several columns named 'y'; rename them"):
        read_frame(tmp_path / "t.parquet")


def test_a_table_of_too_many_columns_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="100,001 columns, and a table is read with at most 100,000"):
        read_frame(csv(tmp_path, ",".join(map(str, range(100_001))) + "\n"))


CELLS = {
    "lists": [[1, 2], [3]],
    "mappings": [{"a": 1}, {"a": 2}],
    "arrays": [np.zeros(2), np.ones(2)],
    "numbers of 400 digits": [10**400, 10**401],
    "decimals": [Decimal("1.5"), Decimal("2.5")],
}


@pytest.mark.parametrize("kind", CELLS)
def test_cells_that_are_neither_numbers_nor_texts(kind: str) -> None:
    frame = pd.DataFrame({"x": pd.Series(CELLS[kind], dtype=object), "more": [1.0, 2.0], "label": [0, 1]})
    with pytest.raises(DataError, match=r"column 'x' holds (a |an |numbers of type)"):
        as_source(frame, label="label")
    if kind in ("lists", "mappings", "arrays"):
        with pytest.raises(DataError, match=r"column 'x' holds an? "):
            as_source(frame, label="label", client="x")
        with pytest.raises(DataError, match=r"column 'x' holds an? "):
            without_gaps([frame], "impute", ["label"], ())


def test_images_may_have_any_name(tmp_path: Path) -> None:
    images(tmp_path / "set", "a", "b")
    (tmp_path / "set" / "a" / "0.png").rename(tmp_path / "set" / "a" / os.fsdecode(b"\xff.png"))
    assert len(sources.make("folder", path=str(tmp_path / "set"), size=4).train) == 4


def test_items_of_three_fields_are_refused_with_their_fields() -> None:
    data = TensorDataset(torch.zeros(4, 2), torch.arange(4), torch.tensor([0, 1, 0, 1]))  # input, patient, diagnosis
    for items in (data, Subset(data, range(4))):
        with pytest.raises(DataError, match=r"have 3 fields \(0: a Tensor of shape .*give pairs \(input, target\)"):
            as_source(items)
