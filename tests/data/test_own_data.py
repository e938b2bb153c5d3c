"""User-defined data: every form gives the same federation, and unusable data end in a sentence."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from fedloom import Federation, FedLoomError, Index
from fedloom.base.errors import DataError
from fedloom.config import resolve
from fedloom.config.keys import DATA
from fedloom.data import as_source, federate, sources

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = RNG.integers(0, 3, 60)
WHO = np.array(["ann", "bob", "cyd"])[RNG.integers(0, 3, 60)]


class Pairs(Dataset):
    def __init__(self, x: Any = X, y: Any = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


class Single(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> int:
        return row


def frame(**changes: Any) -> pd.DataFrame:
    columns = {"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "class": Y, "who": WHO} | changes
    return pd.DataFrame(columns)


FORMS = {
    "arrays": lambda: federate((X, Y), "iid", 5),
    "inputs and targets": lambda: federate(X, "iid", 5, y=Y),
    "tensors": lambda: federate((torch.from_numpy(X), torch.from_numpy(Y)), "iid", 5),
    "mapping": lambda: federate({"x": X, "y": Y}, "iid", 5),
    "TensorDataset": lambda: federate(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), "iid", 5),
    "Dataset": lambda: federate(Pairs(), "iid", 5),
    "frame": lambda: federate(frame(), "iid", 5, label="class", features=["a", "b", "c"]),
    "int8": lambda: federate((X, Y.astype(np.int8)), "iid", 5),
    "big-endian": lambda: federate((X.astype(">f4"), Y.astype(">i2")), "iid", 5),
    "a column of labels": lambda: federate((X, Y[:, None]), "iid", 5),
    "unsigned": lambda: federate((X, Y.astype(np.uint16)), "iid", 5),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_federation(form: str) -> None:
    reference, federation = FORMS["arrays"](), FORMS[form]()
    assert torch.equal(federation.train.arrays.x, torch.from_numpy(X))
    assert torch.equal(federation.train.arrays.y, torch.from_numpy(Y))
    assert federation.train.arrays.y.dtype == torch.int64
    assert federation.provenance["fingerprint"] == reference.provenance["fingerprint"]
    assert len(federation.test) == 0


def owners(federation: Federation) -> dict[str, list[int]]:
    """All rows of each named client, whatever their role."""
    splits = federation.train, federation.validation, federation.held_out
    parts = [np.concatenate([split.index[k] for split in splits]) for k in range(len(federation))]
    return {name: sorted(rows.tolist()) for name, rows in zip(federation.names, parts, strict=True)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: federate((X, Y), client=WHO),
        lambda: federate((X, Y), "natural", client=list(WHO)),
        lambda: federate((X, Y), WHO),
        lambda: federate((X, Y), list(WHO)),
        lambda: federate(frame(), label="class", client="who"),
    ],
)
def test_natural_clients(make) -> None:
    assert owners(make()) == {name: np.flatnonzero(name == WHO).tolist() for name in ("ann", "bob", "cyd")}


def test_one_data_set_for_each_client() -> None:
    rows = [np.flatnonzero(name == WHO) for name in ("ann", "bob", "cyd")]
    several = [
        federate([(X[at], Y[at]) for at in rows], held_out=0.0),
        federate([Pairs(X[at], Y[at]) for at in rows], held_out=0.0),
        federate([frame().iloc[at].drop(columns="who") for at in rows], held_out=0.0, label="class"),
        federate({name: (X[at], Y[at]) for name, at in zip("abc", rows, strict=True)}, held_out=0.0),
    ]
    for federation in several:
        for client, at in enumerate(rows):
            np.testing.assert_array_equal(federation.train.client(client).x, X[at])
            np.testing.assert_array_equal(federation.train.client(client).y, Y[at])
    assert several[-1].names == ("a", "b", "c")
    assert len(federate([(X[:4], Y[:4])] * 12).names) == 12
    assert federate([(X[:4], Y[:4])] * 12).names[2] == "02"  # in the order of the list


def test_one_test_set_for_each_client() -> None:
    train, tests = (
        [(X[:20], Y[:20]), (X[20:30], Y[20:30]), (X[30:], Y[30:])],
        [(X[:4], Y[:4]), (X[:0], Y[:0]), (X[4:9], Y[4:9])],
    )
    federation = federate(train, test=tests, held_out="natural")
    assert federation.train.index.sizes.tolist() == [20, 10, 30]
    assert [federation.held_out.index[client].tolist() for client in range(3)] == [[0, 1, 2, 3], [], [4, 5, 6, 7, 8]]
    np.testing.assert_array_equal(federation.test.x, X[:9].astype(np.float32))
    by_name = federate(dict(zip("abc", train, strict=True)), test={"c": tests[2], "a": tests[0]}, held_out="natural")
    assert [len(by_name.held_out.index[client]) for client in range(3)] == [4, 0, 5]
    np.testing.assert_array_equal(by_name.held_out.client(2).x, federation.held_out.client(2).x)


def test_explicit_rows() -> None:
    lists = [[0, 5, 7], [1, 2], [59, 3, 4, 6]]
    for partition in (lists, [np.array(rows) for rows in lists], Index.of(lists)):
        federation = federate((X, Y), partition, held_out=0.0)
        assert [federation.train.index[k].tolist() for k in range(3)] == [sorted(rows) for rows in lists]
        assert federation.provenance["partition"] == {"name": "rows", "clients": 3}


def test_texts_categories_and_truth_values_become_classes() -> None:
    words = np.array(["low", "mid", "top"])[Y]
    for y in (words, words.astype(object), list(words), words[:, None]):
        arrays = as_source((X, y)).train
        assert (arrays.names, arrays.classes) == (("low", "mid", "top"), 3)
        assert torch.equal(arrays.y, torch.from_numpy(Y))
    ordered = pd.Categorical(words, categories=["top", "mid", "low"], ordered=True)
    arrays = as_source(frame(**{"class": ordered}), label="class", features=["a"]).train
    assert arrays.names == ("top", "mid", "low")
    assert torch.equal(arrays.y, torch.from_numpy(2 - Y))
    truths = as_source((X, Y > 0)).train
    assert (truths.classes, truths.y.dtype) == (2, torch.int64)
    with pytest.warns(UserWarning, match="only test samples have the class 'xtra'"):
        test = as_source((X, words), test=(X[:2], np.array(["top", "xtra"])))
    assert test.test.y.tolist() == [2, 3]
    assert test.train.classes == 4


def test_several_labels_and_numbers() -> None:
    many = RNG.random((60, 4)) < 0.3
    for y in (many, many.astype(np.int64), many.astype(np.float32)):
        assert as_source((X, y)).train.y.dtype == torch.float32
    tokens = RNG.integers(0, 2, (60, 4))
    assert as_source((tokens, many.astype(np.int64))).train.y.dtype == torch.int64  # labels of a sequence
    both = as_source(frame(d=X[:, 0] ** 2), label=["b", "d"], features=["a"]).train
    assert tuple(both.y.shape) == (60, 2)
    assert both.y.is_floating_point()


@pytest.mark.filterwarnings("ignore:.*with which models train poorly")  # they are only read
def test_tables_become_numbers() -> None:
    table = pd.DataFrame({"age": [30, 40, 50], "sex": ["f", "m", "f"], "own": [True, False, True], "y": [0, 1, 1]})
    source = as_source(table, label="y")
    assert source.train.x.tolist() == [[30, 1, 0, 1], [40, 0, 1, 0], [50, 1, 0, 1]]
    assert source.settings["columns"] == ["age", "sex=f", "sex=m", "own"]


def test_images_of_bytes_become_pixels_in_0_to_1() -> None:
    images = RNG.integers(0, 256, (6, 8, 8, 3)).astype(np.uint8)
    pictures = [Image.fromarray(image) for image in images]
    for data in ((images, Y[:6]), Pairs(pictures, Y[:6])):
        x = as_source(data).train.x
        assert tuple(x.shape) == (6, 3, 8, 8)
        np.testing.assert_allclose(x.numpy(), images.transpose(0, 3, 1, 2) / np.float32(255), rtol=1e-6)


LACKING = frame(a=[np.nan, *X[1:, 0]])
REFUSED: dict[str, tuple[Any, str]] = {
    "no targets": (lambda: federate(X, "iid", 5), r"no targets; give a pair \(x, y\)"),
    "no partition": (lambda: federate((X, Y)), r"needs a partition and a number of clients, like"),
    "a list of arrays": (lambda: federate([X, Y], "iid", 5), r"a list holds one data set per client; .* pair \(x, y\)"),
    "a number": (lambda: federate(3, "iid", 5), r"own data is 3; give a pair of arrays"),
    "lengths": (lambda: federate((X, Y[:9]), "iid", 5), r"60 inputs but 9 targets"),
    "labels from -1": (lambda: federate((X, 2 * (Y > 0) - 1), "iid", 5), r"label -1, but .* from 0; .* give y > 0"),
    "missing labels": (lambda: federate((X, [None, *Y[1:]]), "iid", 5), r"none missing"),
    "missing values": (
        lambda: federate(LACKING, "iid", 5, label="class"),
        r"has missing values, column 'a' in 1 of 60 rows; fill",
    ),
    "no label": (
        lambda: federate(frame(), "iid", 5),
        r"name the target column with label=, one of: a, b, c, class, who",
    ),
    "label": (lambda: federate(frame(), "iid", 5, label="clas"), r"no column 'clas'; did you mean 'class'\?"),
    "dates": (
        lambda: federate(frame(a=pd.Timestamp("2020-01-01")), "iid", 5, label="class"),
        r"column 'a' holds dates; turn it into numbers",
    ),
    "texts": (lambda: federate((WHO, Y), "iid", 5), r"own data: x holds text"),
    "test shapes": (
        lambda: federate((X, Y), "iid", 2, test=(X[:, :2], Y)),
        r"a training sample has x of shape \[\d\] and type torch\.float32, but a test sample \[2\]",
    ),
    "test numbers": (
        lambda: federate((X, Y + 0.5), "iid", 2, test=(X, Y)),
        r"some targets are whole numbers and others floats; convert them to one type",
    ),
    "shapes": (lambda: federate(Pairs([X[0], X[0, :2]], Y[:2]), "iid", 2), r"sample 1 \[2\]; resize or pad"),
    "items": (lambda: federate(Single(), "iid", 2), r"an item of own data is .* pair"),
    "ids": (lambda: federate((X, Y), client=WHO[:3]), r"60 samples, but client ids of shape \[3\]"),
    "rows beyond": (lambda: federate((X, Y), [[0, 60]]), r"client 0 holds a row that is not among 0 to 59"),
    "rows twice": (lambda: federate((X, Y), [[0, 1], [1]]), r"client 1 holds a row twice, or one that another"),
    "no rows": (lambda: federate((X, Y), [[0], []]), r"rows of client 1 must be a list of one or more"),
    "partition": (lambda: federate((X, Y), 5), r"the partition is 5; give the name of one"),
    "clients": (lambda: federate((X, Y), "iid", "five"), r"clients is 'five', but it must be a whole number"),
    "alpha": (lambda: federate((X, Y), {"alpha": 1}, 5), r"the partition is a dict; give the name"),
    "named source": (lambda: federate("digits", "iid", 5, y=Y), r"y= belongs to own data"),
    "clients that lack": (
        lambda: federate((X, Y), client=pd.Series([None, np.nan, *WHO[2:]])),
        r"2 of 60 samples have no client",
    ),
    "days": (lambda: federate(frame(a=datetime.date(2020, 1, 1)), "iid", 5, label="class"), r"column 'a' holds dates"),
    "row numbers": (
        lambda: federate(frame().rename(columns={"a": "Unnamed: 0"}), "iid", 5, label="class"),
        r"row numbers that pandas",
    ),
    "columns twice": (
        lambda: federate(frame().rename(columns={"a": "b"}), "iid", 5, label="class"),
        r"several columns named 'b'",
    ),
    "an input that is the label": (
        lambda: federate(frame(), "iid", 5, label="class", features=["a", "class"]),
        r"column 'class' is an input and also the label or client; leave it out of data\.features",
    ),
    "an input twice": (
        lambda: federate(frame(), "iid", 5, label="class", features=["a", "a"]),
        r"column 'a' is an input twice",
    ),
    "targets twice": (lambda: federate(frame(), "iid", 5, y=Y, label="class"), r"has its targets already; leave y="),
    "targets of arrays": (lambda: as_source(sources.make("digits").train, Y), r"has its targets already; leave y="),
    "a table and arrays": (
        lambda: federate(frame(), "iid", 5, label="class", test=(X, Y)),
        r"some of the data sets are tables and others arrays; give all in the same form",
    ),
    "large labels": (lambda: federate((X, [10**30] * 60), "iid", 5), r"a target beyond 64-bit integers; number the"),
    "bytes": (lambda: federate((X, np.array([b"\xff"] * 60)), "iid", 5), r"bytes that are not text in UTF-8; decode"),
    "an empty client": (lambda: as_source([(X, Y), (X[:0], Y[:0])]), r"of client 1 has no samples; leave it out"),
    "several inputs": (lambda: federate(Pairs([(x, x[:2]) for x in X], Y), "iid", 2), r"join them to one array per sa"),
    "inputs by name": (
        lambda: federate(Pairs([{"x": x} for x in X], Y), "iid", 2),
        r"join them to one array per sample",
    ),
    "ragged rows": (
        lambda: federate(([[1.0], [1.0, 2.0]], [0, 1]), "iid", 2),
        r"own data: x holds arrays of different",
    ),
    "ragged labels": (lambda: federate((X[:2], [[1], [1, 2]]), "iid", 2), r"own data: y holds arrays of different"),
    "test sets, data": (
        lambda: federate((X, Y), "iid", 2, test=[(X, Y)]),
        r"test= is one data set per client, but the",
    ),
    "test sets, number": (
        lambda: federate([(X, Y)] * 2, test=[(X, Y)]),
        r"is 2 data sets, but test= is 1; give one for",
    ),
    "test sets, names": (
        lambda: federate({"a": (X, Y)}, test={"b": (X, Y)}),
        r"names client 'b', which has no data set",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(FedLoomError, match=sentence):
        call()


def test_an_npz_file_has_labels_in_a_column_too_but_no_texts(tmp_path: Path) -> None:
    np.savez(tmp_path / "column.npz", x_train=X, y_train=Y[:, None])
    assert torch.equal(sources.make("npz", path=tmp_path / "column.npz").train.y, torch.from_numpy(Y))
    np.savez(tmp_path / "texts.npz", x_train=X, y_train=WHO)
    with pytest.raises(DataError, match="y_train holds text; number the classes from 0 on, and give their names as"):
        sources.make("npz", path=tmp_path / "texts.npz")


@pytest.mark.parametrize("data", [(X, Y), Pairs()], ids=["arrays", "a data set"])
def test_a_registered_function_may_return_data_in_any_form(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_entries", dict(sources._entries))
    sources.register(name="mine")(lambda: data)
    assert federate("mine", "iid", 5).provenance["fingerprint"] == federate((X, Y), "iid", 5).provenance["fingerprint"]
    assert DATA.instantiate({"name": "mine"}).name == "mine"


def test_targets_in_bfloat16_are_numbers() -> None:
    halves = torch.arange(60).to(torch.bfloat16) / 2
    assert torch.equal(as_source((X, halves)).train.y, halves.float())


class Named(Dataset):
    def __init__(self, classes: list[str], labels: list[int]) -> None:
        self.classes, self.labels = classes, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), self.labels[row]


def test_numbers_of_classes_with_other_names_at_each_client() -> None:
    here, there = Named(["cat", "dog"], [0, 1]), Named(["dog", "fish"], [0, 1])
    source = as_source([here, there], test=there)
    assert source.train.names == ("cat", "dog", "fish")
    assert (source.train.y.tolist(), source.test.y.tolist()) == ([0, 1, 1, 2], [1, 2])
    assert as_source([here, here]).train.names == ("cat", "dog")
    with pytest.raises(FedLoomError, match="different class names, and some have none"):
        as_source([here, there, (torch.zeros(2, 2), torch.tensor([0, 1]))])
    with pytest.raises(FedLoomError, match="a label 5, but only 2 class names"):
        as_source([here, Named(["dog", "fish"], [5])])


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [("P", (255, 0, 0), [1, 0, 0]), ("CMYK", (255, 0, 0), [1, 0, 0]), ("LA", 128, [128 / 255]), ("1", 255, [1])],
)
def test_images_of_other_modes_keep_their_colours(mode: str, value: Any, expected: list[float]) -> None:
    grey = isinstance(value, int)
    image = Image.new("L" if grey else "RGB", (4, 4), value).convert(mode)

    x = as_source(Pairs([image, image], np.arange(2))).train.x
    assert x.shape == (2, len(expected), 4, 4)
    torch.testing.assert_close(x[0, :, 0, 0], torch.tensor(expected).float(), rtol=0, atol=0.01)


def test_sixteen_bits_become_eight_and_grey_joins_colour() -> None:
    ramp = Image.fromarray(np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4))
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    images = as_source(Pairs([ramp, ramp], np.arange(2))).train.x
    torch.testing.assert_close(images[0, 0].flatten(), torch.linspace(0, 1, 16), rtol=0, atol=0.004)
    mixed = as_source(Pairs([red, Image.new("L", (4, 4), 51)], np.arange(2))).train.x
    assert mixed[:, :, 0, 0].tolist() == [[1, 0, 0], pytest.approx([0.2] * 3)]


def test_lists_are_arrays_and_names_may_be_alike() -> None:
    source = as_source(([[1.0, 2.0], [3.0, 4.0]], [0, 1]))
    assert source.train.x.tolist() == [[1, 2], [3, 4]]
    twice = Named(["crane", "crane"], [0, 1])  # the bird and the machine
    assert as_source(twice).train.names == ("crane", "crane")


def test_bytes_with_channels_first_and_tensors_of_bytes_are_images() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (6, 3, 5, 5), dtype=np.uint8)
    last = as_source(raw.transpose(0, 2, 3, 1), np.arange(6) % 2).train.x
    for images in (raw, torch.from_numpy(raw)):
        assert torch.equal(as_source(images, np.arange(6) % 2).train.x, last)
    grey = as_source(torch.from_numpy(raw[:, 0]), np.arange(6) % 2).train.x
    assert torch.equal(grey[:, 0], last[:, 0])


def test_a_folder_of_arrays_is_mapped_and_not_read(tmp_path: Path) -> None:
    for name, array in {"x_train": X, "y_train": Y, "x_test": X[:5], "y_test": Y[:5], "client_train": WHO}.items():
        np.save(tmp_path / f"{name}.npy", array)
    federation = federate(f"npz:{tmp_path}")
    assert federation.names == ("ann", "bob", "cyd")
    assert len(federation.test) == 5
    x = federation.train.arrays.x
    on_disk = np.load(tmp_path / "x_train.npy", mmap_mode="r+")
    on_disk[7] = 123.0  # the federation sees what the file holds, so that it has no copy
    on_disk.flush()
    assert (x[7] == 123).all()
    (tmp_path / "y_train.npy").unlink()
    with pytest.raises(FedLoomError, match=r"lacks y_train\.npy"):
        federate(f"npz:{tmp_path}")


@pytest.mark.extra("flwr_datasets")
def test_hub_data_through_flwr_datasets(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    home = tmp_path / "table"
    home.mkdir()
    table = frame().rename(columns={"class": "label"})
    table[:50].to_csv(home / "train.csv", index=False)
    table[50:].to_csv(home / "test.csv", index=False)
    federation = federate(build_source(f"hub:{home}", "data.client=who"))
    assert federation.names == ("ann", "bob", "cyd")
    assert (len(federation.train.arrays), len(federation.test)) == (50, 10)
    assert federation.provenance["source"]["dataset"] == str(home)
    with pytest.raises(FedLoomError, match=r"the split 'nope' of .* cannot be loaded"):
        build_source(f"hub:{home}", "data.train=nope")


def build_source(name: str, *words: str) -> Any:
    return DATA.instantiate(resolve([f"data={name}", *words])["data"])


@pytest.mark.extra("datasets")
def test_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_pandas(frame().rename(columns={"class": "label"}))
    federation = federate(dataset, client="who", features=["a", "b", "c"])
    np.testing.assert_array_equal(federation.train.arrays.x, X)
    both = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(7))})
    assert len(federate(both, client="who").test) == 7
    arrays = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y})
    np.testing.assert_array_equal(federate(arrays, "iid", 3, label="y").train.arrays.x, X)


def test_clients_whose_numbers_are_floats_in_one_table_are_the_same_clients() -> None:
    train = pd.DataFrame({"a": [0.0, 1, 2, 3], "who": [1, 1, 2, 3], "y": [0, 1, 0, 1]})
    test = pd.DataFrame({"a": [4.0, 5], "who": [2.0, 3.0], "y": [1, 0]})
    federation = federate(train, client="who", label="y", test=test, held_out="natural")
    assert federation.names == ("1", "2", "3")
    assert federation.held_out.index.sizes.tolist() == [0, 1, 1]


def test_samples_of_one_class_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="own data: all samples have the same class; there is nothing to learn"):
        as_source((np.zeros((4, 2)), np.array(["x"] * 4)))


def test_random_items_of_a_torch_data_set_are_noticed() -> None:
    class Noisy(Pairs):
        def __getitem__(self, row: int) -> Any:
            return self.x[row] + torch.rand(()).item(), self.y[row]

    with pytest.warns(UserWarning, match="items of own data differ when they are read again, as by a random transform"):
        as_source(Noisy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_source(Pairs())


def test_a_data_set_with_a_test_and_a_validation_split_has_both() -> None:
    parts = {"train": (X, Y), "test": (X[:7], Y[:7]), "validation": (X[:5], Y[:5])}
    source = as_source(parts)
    assert source.validation is not None
    assert (len(source.test), len(source.validation)) == (7, 5)
    del parts["test"]  # then the validation split is the test set, unless there is another
    assert (len(as_source(parts).test), as_source(parts).validation) == (5, None)
    source = as_source(parts, test=(X[:7], Y[:7]))
    assert source.validation is not None
    assert (len(source.test), len(source.validation)) == (7, 5)


def test_labels_and_names_may_be_bytes_and_scalars_of_numpy(tmp_path: Path) -> None:
    """As files of HDF5, and columns of Python objects, hold them."""
    names = np.array(["non", "été"])
    encoded = np.char.encode(names[Y % 2], "utf-8")
    source = as_source((X, encoded), client=np.char.encode(WHO, "utf-8"))
    assert source.train.names == ("non", "été")
    assert source.group_names == ("ann", "bob", "cyd")
    arrays = {"x_train": X, "y_train": Y % 2, "names": np.char.encode(names, "utf-8"), "client_train": encoded}
    np.savez(tmp_path / "bytes.npz", **arrays)
    stored = sources.make("npz", path=tmp_path / "bytes.npz")
    assert stored.train.names == stored.group_names == ("non", "été")
    assert as_source((X, np.array([np.int32(label) for label in Y], dtype=object))).train.y.tolist() == Y.tolist()


@pytest.mark.parametrize("in_folder", [False, True])
def test_an_array_that_is_not_read_is_named(in_folder: bool, tmp_path: Path) -> None:
    arrays = {"x_train": X, "y_train": Y, "x_val": X, "notes": Y}
    path = tmp_path / ("arrays" if in_folder else "arrays.npz")
    if in_folder:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    else:
        np.savez(path, **arrays)
    with pytest.warns(UserWarning, match="'x_val' is not read; there are: .*x_validation") as caught_warnings:
        sources.make("npz", path=path)
    assert len(caught_warnings) == 1


def test_a_missing_target_of_a_test_sample_is_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "lacking.npz", x_train=X, y_train=Y, x_test=X, y_test=np.where(Y == 1, np.nan, Y))
    with pytest.raises(DataError, match=r"NaN or infinity in \d+ of 60 targets"):
        sources.make("npz", path=tmp_path / "lacking.npz")
