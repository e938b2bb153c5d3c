"""Readers, on small files in the original formats."""

import gzip
import os
import pickle
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pictures import write_idx, write_split

from fedloom.base.errors import ConfigError, DataError
from fedloom.data import from_tensors, sources
from fedloom.data.sources.arrays import to_images
from fedloom_apps.readers.formats import read_idx
from fedloom_apps.readers.mnist import CLASSES

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("no_data_folder")


def write_mnist(folder: Path, prefix: tuple[str, str], suffix: str = "", first: int = 0, classes: int = 10) -> list:
    splits = []
    for part, n in zip(prefix, (30, 20), strict=True):
        x = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        y = (np.arange(n) % classes + first).astype(np.uint8)
        write_split(folder, part, x, y, suffix)
        splits.append((x, y))
    return splits


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_reads_every_type(dtype: str, suffix: str, tmp_path: Path) -> None:
    array = (RNG.standard_normal((5, 3, 2)) * 50).astype(dtype)
    write_idx(tmp_path / f"a{suffix}", array)
    result = read_idx(tmp_path / f"a{suffix}")
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx_files_get_one_sentence(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"whole{suffix}"
    write_idx(path, RNG.integers(0, 256, (50, 28, 28), dtype=np.uint8))
    blob = path.read_bytes()
    for cut in (1, 3, 10, len(blob) // 2, len(blob) - 1):
        (tmp_path / "cut").write_bytes(blob[:cut])
        with pytest.raises(DataError, match=r"truncated|is not an idx file|damaged"):
            read_idx(tmp_path / "cut")
    with pytest.raises(DataError, match="not an idx file with 1 dimensions"):
        read_idx(path, dims=1)
    (tmp_path / "other").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 100)
    with pytest.raises(DataError, match="it begins with 89 50 4e 47"):
        read_idx(tmp_path / "other")
    longer = gzip.compress(gzip.decompress(blob) + b"!") if suffix else blob + b"!"
    (tmp_path / "longer").write_bytes(longer)
    with pytest.raises(DataError, match="goes on after"):
        read_idx(tmp_path / "longer")


def test_a_lying_header_asks_for_no_memory(tmp_path: Path) -> None:
    (tmp_path / "lie").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**15, 2**10))
    with pytest.raises(DataError, match="truncated"):
        read_idx(tmp_path / "lie")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_in_torchvisions_layout(suffix: str, tmp_path: Path) -> None:
    (x, y), (u, _) = write_mnist(tmp_path / "MNIST" / "raw", ("train", "t10k"), suffix)
    source = sources.make("mnist", root=str(tmp_path))
    assert source.train.x.shape == (30, 1, 28, 28)
    assert source.train.x.dtype == torch.float32
    torch.testing.assert_close(source.train.x[:, 0], (torch.tensor(x) / 255 - 0.1307) / 0.3081)
    assert source.train.y.tolist() == y.tolist()
    plain = sources.make("mnist", root=str(tmp_path), normalise=False)
    torch.testing.assert_close(plain.test.x[:, 0], torch.tensor(u) / 255)
    assert source.groups is None

    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.arange(30) // 3 + 100, writer_test=np.arange(20) // 2)
    source = sources.make("mnist", root=str(tmp_path))
    assert source.groups is not None
    assert len(set(source.groups)) == 10
    assert source.group_names[source.groups[0]] == "writer 100"


def test_what_is_missing_is_said_with_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "here"))
    with pytest.raises(DataError) as error:
        sources.make("fashion_mnist")
    for part in ("FashionMNIST/raw/train-images-idx3-ubyte", str(tmp_path / "here"), ".cache/fedloom", "download=true"):
        assert part in str(error.value)
    write_mnist(tmp_path / "here" / "MNIST" / "raw", ("train", "t10k"))
    (tmp_path / "here" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="expected MNIST/raw/t10k-labels-idx1-ubyte in"):
        sources.make("mnist")
    with pytest.raises(DataError, match=r"cifar100.npz, or cifar-100-python/train and test and meta in"):
        sources.make("cifar100")


def test_a_download_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails: list[type[BaseException]] = [KeyboardInterrupt, OSError]

    class FashionMNIST:
        def __init__(self, root: str, download: bool) -> None:
            write_mnist(Path(root) / "FashionMNIST" / "raw", ("train", "t10k"))
            if fails:
                raise fails.pop()("no route")

    fake = types.ModuleType("torchvision")
    fake.datasets = types.SimpleNamespace(FashionMNIST=FashionMNIST)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    root = tmp_path / "data"
    with pytest.raises(DataError, match=r"could not be downloaded into .*no route"):
        sources.make("fashion_mnist", root=str(root), download=True)
    with pytest.raises(KeyboardInterrupt):
        sources.make("fashion_mnist", root=str(root), download=True)
    assert not list(root.iterdir())
    assert len(sources.make("fashion_mnist", root=str(root), download=True).train) == 30
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


def test_emnist_is_shown_upright_and_numbered_from_zero(tmp_path: Path) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    (x, _), _ = write_mnist(raw, ("emnist-letters-train", "emnist-letters-test"), first=1, classes=26)
    source = sources.make("emnist", root=str(tmp_path), normalise=False)
    torch.testing.assert_close(source.train.x[:, 0], torch.tensor(x).transpose(1, 2) / 255)
    assert source.train.y.tolist() == [n % 26 for n in range(30)]
    assert source.train.names[0] == "a"
    ten = sources.make("emnist_l", root=str(tmp_path), normalise=False)
    assert ten.train.classes == 10
    assert ten.train.y.tolist() == [*range(10), 0, 1, 2, 3]
    torch.testing.assert_close(ten.train.x[0, 0], torch.tensor(x[0]).T / 255)
    assert {name: len(classes) for name, classes in CLASSES.items()} == {
        "letters": 26,
        "byclass": 62,
        "balanced": 47,
        "digits": 10,
    }
    with pytest.raises(ConfigError, match="did you mean 'letters'"):
        sources.make("emnist", split="letter")


class Python2(pickle._Pickler):  # type: ignore[name-defined]
    """Pickles as Python 2 did, whose strings are bytes: what the official CIFAR files hold."""

    dispatch = pickle._Pickler.dispatch.copy()  # type: ignore[attr-defined]

    def save_string(self, text: bytes | str) -> None:
        blob = text if isinstance(text, bytes) else text.encode()
        short = len(blob) < 256
        self.write(
            pickle.SHORT_BINSTRING + bytes([len(blob)]) if short else pickle.BINSTRING + struct.pack("<i", len(blob))
        )
        self.write(blob)
        self.memoize(text)

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def write_batch(path: Path, content: dict, kind: type = Python2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        kind(file, 2).dump(content)


@pytest.mark.parametrize("kind", [Python2, pickle.Pickler])
def test_cifar_batches_are_read_as_published(kind: type, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    data = RNG.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    for k, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        write_batch(folder / name, {"batch_label": name, "labels": [0, 1, 2, k], "data": data[k]}, kind)
    write_batch(folder / "batches.meta", {"label_names": [f"class {c}" for c in range(10)], "num_vis": 3072}, kind)
    source = sources.make("cifar10", root=str(tmp_path), normalise=False)
    assert source.train.x.shape == (20, 3, 32, 32)
    assert source.train.y.tolist() == [0, 1, 2, 0, 0, 1, 2, 1, 0, 1, 2, 2, 0, 1, 2, 3, 0, 1, 2, 4]
    torch.testing.assert_close(source.test.x, torch.tensor(data[5].reshape(4, 3, 32, 32)) / 255)
    assert source.train.names[9] == "class 9"

    folder = tmp_path / "cifar-100-python"
    for k, name in enumerate(["train", "test"]):
        write_batch(folder / name, {"fine_labels": [0, 99], "coarse_labels": [1, 19], "data": data[k, :2]}, kind)
    names = {"fine_label_names": [f"f{c}" for c in range(100)], "coarse_label_names": [f"c{c}" for c in range(20)]}
    write_batch(folder / "meta", names, kind)
    assert sources.make("cifar100", root=str(tmp_path)).train.classes == 100
    assert sources.make("cifar100", root=str(tmp_path), labels="coarse").test.y.tolist() == [1, 19]


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("exit 7",)


def test_pickles_that_carry_code_or_are_cut_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    batch = {"fine_labels": [0], "data": RNG.integers(0, 256, (1, 3072), dtype=np.uint8)}
    write_batch(folder / "train", batch)
    write_batch(folder / "test", {**batch, "extra": Evil()}, pickle.Pickler)
    write_batch(folder / "meta", {"fine_label_names": [str(c) for c in range(100)]})
    with pytest.raises(DataError, match=r"it asks for posix.system, which no data file needs"):
        sources.make("cifar100", root=str(tmp_path))
    blob = (folder / "train").read_bytes()
    (folder / "train").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(DataError, match="train cannot be read as a pickle"):
        sources.make("cifar100", root=str(tmp_path))
    write_batch(folder / "train", {"data": [1, 2], "fine_labels": [0]})
    with pytest.raises(DataError, match="3072 pixels for each label"):
        sources.make("cifar100", root=str(tmp_path))


def test_cifar_npz(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    y = np.arange(8)
    names = np.array([f"n{c}" for c in range(10)])
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], names=names)
    source = sources.make("cifar10", root=str(tmp_path))
    expected = (torch.tensor(x[0, ..., 2]) / 255 - 0.4465) / 0.2616
    torch.testing.assert_close(source.train.x[0, 2], expected)
    assert source.train.names[3] == "n3"
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y[:, None], x_test=x[:2], y_test=y[:2, None])
    assert torch.equal(sources.make("cifar10", root=str(tmp_path)).train.y, source.train.y)


@pytest.mark.parametrize(("images", "labels", "message"), [
    (np.zeros((4, 3, 32, 32), np.uint8), np.arange(4), "images must have 3 channels, the last axis, but their shape"),
    (np.zeros((4, 32, 32), np.uint8), np.arange(4), "images must have 3 channels, the last axis, but their shape"),
    (np.zeros((4, 32, 32, 3), np.uint8), np.arange(4) / 2, "y_train must be one whole number for each sample"),
    (np.zeros((4, 32, 32, 3), np.uint8), np.array(list("abab")), "y_train holds text"),
])  # fmt: skip
def test_cifar_npz_in_another_form(images: np.ndarray, labels: np.ndarray, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(DataError, match=message):
        sources.make("cifar10", root=str(tmp_path))


def test_cifar100_npz_has_labels_of_two_kinds(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    fine, coarse = np.arange(8), np.arange(8) // 4
    arrays = {"x_train": x, "y_train": fine, "x_test": x[:2], "y_test": fine[:2]}
    np.savez(tmp_path / "cifar100.npz", **arrays)
    with pytest.raises(DataError, match="coarse_train"):
        sources.make("cifar100", root=str(tmp_path), labels="coarse")
    arrays |= {"coarse_train": coarse, "coarse_test": coarse[:2], "coarse_names": np.array(["fish", "trees"])}
    np.savez(tmp_path / "cifar100.npz", **arrays)
    source = sources.make("cifar100", root=str(tmp_path), labels="coarse")
    assert (source.train.y.tolist(), source.test.y.tolist()) == (coarse.tolist(), [0, 0])
    assert (source.train.names, source.train.classes) == (("fish", "trees"), 2)
    assert sources.make("cifar100", root=str(tmp_path)).train.y.tolist() == fine.tolist()


def test_anyones_npz(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=np.zeros((4, 3)), y_train=[0, 2, 1, 0], client_train=["b", "a", "b", "b"])
    source = sources.make("npz", path=str(path))
    assert (source.name, source.train.classes, len(source.test)) == ("mine", 3, 0)
    assert source.train.x.dtype == torch.float32
    assert source.group_names == ("a", "b")
    with pytest.raises(DataError, match="label 2, but there are 2 classes"):
        sources.make("npz", path=str(path), classes=2)
    blob = path.read_bytes()
    path.write_bytes(blob[: len(blob) // 2])
    with pytest.raises(DataError, match=r"mine.npz is truncated or not an npz file"):
        sources.make("npz", path=str(path))
    path.write_text("no npz file")  # NumPy's own sentence advises to unpickle it
    with pytest.raises(DataError, match=r"not an npz file of plain arrays\.$"):
        sources.make("npz", path=str(path))
    np.savez(path, x=np.zeros(3))
    with pytest.raises(DataError, match="lacks x_train, y_train; it holds x"):
        sources.make("npz", path=str(path))
    np.savez(path, x_train=np.array([{}], dtype=object), y_train=[0])
    with pytest.raises(DataError, match="not an npz file of plain arrays"):
        sources.make("npz", path=str(path))
    np.savez(path, x_train=np.array([[np.nan]]), y_train=[0])
    with pytest.raises(DataError, match="NaN or infinity"):
        sources.make("npz", path=str(path))
    with pytest.raises(DataError, match="there is no file"):
        sources.make("npz", path=str(tmp_path / "none.npz"))
    with pytest.raises(ConfigError, match="needs a value for 'path'"):
        sources.make("npz")


def test_tensors_are_shared_not_copied() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    source = from_tensors(x, y)
    assert source.train.x.data_ptr() == x.data_ptr()
    with pytest.raises(DataError, match="4 training samples but 3 client ids"):
        from_tensors(x, y, clients=[1, 2, 3])
    with pytest.raises(DataError, match="images must be uint8"):
        to_images(np.zeros((2, 3)))


def test_digits_are_real_and_split_the_same_whatever_the_seed() -> None:
    source = sources.make("digits")
    assert len(source.train) + len(source.test) == 1797
    assert 0 <= source.train.x.min() < source.train.x.max() == 1
    share = torch.bincount(source.test.y) / (torch.bincount(source.train.y) + torch.bincount(source.test.y))
    assert ((share - 0.2).abs() < 0.01).all()


@pytest.mark.parametrize("kind", ["homogeneous", "type1", "type2", "type3"])
def test_synthetic_has_the_asked_heterogeneity_only(kind: str) -> None:
    source = sources.make("synthetic", heterogeneity=kind, clients=50, seed=3)
    again = sources.make("synthetic", heterogeneity=kind, clients=50, seed=3)
    assert torch.equal(source.train.x, again.train.x)
    assert source.groups is not None
    assert source.groups_test is not None
    sizes = np.bincount(source.groups)
    assert (sizes.std() > 0) == (kind == "type3")
    x = source.train.x.numpy()
    centres = np.stack([x[source.groups == i].mean(0) for i in range(50)])
    assert (centres.std(0).mean() > 0.5) == (kind == "type2")
    within = np.stack([x[source.groups == i].var(0) for i in range(50)]).mean(0)
    np.testing.assert_allclose(within, np.arange(1, 31) ** -1.2, rtol=0.1)
    from sklearn.linear_model import LogisticRegression

    rule = LogisticRegression(C=1e4, max_iter=2000).fit(x, source.train.y.numpy())
    assert (rule.score(x, source.train.y.numpy()) > 0.97) == (
        kind != "type1"
    )  # one linear rule for all clients, or not
    assert set(source.groups_test) == set(range(50))


def test_synthetic_sizes_have_the_asked_mean_and_variance() -> None:
    source = sources.make("synthetic", gamma3=0.5, clients=4000, samples=200, features=2, test=0.0, min_size=1)
    sizes = np.bincount(source.groups)
    assert sizes.mean() == pytest.approx(200, rel=0.05)
    assert np.log(sizes).var() == pytest.approx(0.5, rel=0.1)
    assert len(source.test) == 0
    with pytest.raises(ConfigError, match="gamma1 must be at least 0"):
        sources.make("synthetic", gamma1=-1.0)
    with pytest.raises(ConfigError, match="did you mean 'type1'"):
        sources.make("synthetic", heterogeneity="typ1")
