"""Readers of image folders and image arrays, on small sets in the original formats."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.base.errors import ConfigError, DataError
from fedloom.data import federate, sources
from fedloom.data.plots import plot_samples
from fedloom.data.sources import arrays, files
from fedloom.data.sources.files import cached, write_npz
from fedloom_apps.readers.omniglot import downscale

RNG = np.random.default_rng(0)
KINDS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
pytestmark = pytest.mark.usefixtures("no_data_folder")


def picture(path: Path, side: int | tuple[int, int], grey: bool = False) -> np.ndarray:
    wide, high = (side, side) if isinstance(side, int) else side
    pixels = RNG.integers(0, 256, (high, wide) if grey else (high, wide, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return np.repeat(pixels[..., None], 3, axis=2) if grey else pixels


def cinic(root: Path, per_class: int = 2) -> dict[str, list[np.ndarray]]:
    pixels: dict[str, list[np.ndarray]] = {}
    for part in ("train", "valid", "test"):
        for kind in KINDS:
            folder = root / "CINIC-10" / part / kind
            pixels.setdefault(part, []).extend(
                picture(folder / f"n0{k}.png", 32, grey=kind == "cat") for k in range(per_class)
            )
    return pixels


def test_cinic10(tmp_path: Path) -> None:
    pixels = cinic(tmp_path)
    source = sources.make("cinic10", root=str(tmp_path), normalise=False)
    assert source.train.names == tuple(KINDS)
    assert source.train.y.tolist() == sorted([*range(10), *range(10)])
    torch.testing.assert_close(source.train.x, torch.tensor(np.stack(pixels["train"])).permute(0, 3, 1, 2) / 255)
    torch.testing.assert_close(source.test.x[6], torch.tensor(pixels["test"][6]).permute(2, 0, 1) / 255)
    more = sources.make("cinic10", root=str(tmp_path), validation=True, normalise=False)
    assert len(more.train) == 40
    torch.testing.assert_close(more.train.x[20:], torch.tensor(np.stack(pixels["valid"])).permute(0, 3, 1, 2) / 255)
    assert more.train.y.tolist() == source.train.y.tolist() * 2


def test_decoded_pictures_are_kept_until_the_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cinic(tmp_path, per_class=1)
    first = sources.make("cinic10", root=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(arrays, "read_image", lambda *_: pytest.fail("decoded again"))
        assert torch.equal(sources.make("cinic10", root=str(tmp_path)).train.x, first.train.x)
    picture(tmp_path / "CINIC-10/train/ship/n09.png", 32)
    assert len(sources.make("cinic10", root=str(tmp_path)).train) == 11
    cache = tmp_path / "CINIC-10" / "fedloom-train.npz"
    cache.write_bytes(cache.read_bytes()[:1000])  # damaged: made again
    assert len(sources.make("cinic10", root=str(tmp_path)).train) == 11
    assert cache.stat().st_size > 11 * 32 * 32 * 3


def test_an_interruption_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cinic(tmp_path, per_class=1)
    read, count = arrays.read_image, []

    def stopping(*args, **kwargs) -> np.ndarray:
        count.append(1)
        if len(count) == 7:
            raise KeyboardInterrupt
        return read(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "read_image", stopping)
        with pytest.raises(KeyboardInterrupt):
            sources.make("cinic10", root=str(tmp_path))
    assert not list((tmp_path / "CINIC-10").rglob("*fedloom*"))

    class Stop:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise KeyboardInterrupt

    write_npz(tmp_path / "a.npz", array=np.arange(3))
    with pytest.raises(KeyboardInterrupt):
        write_npz(tmp_path / "a.npz", first=np.zeros(10), array=Stop())
    assert np.load(tmp_path / "a.npz")["array"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.glob("*.npz*")] == ["a.npz"]
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_said_once_and_no_error(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="made again next time"):
        assert cached(tmp_path / "nowhere" / "a.npz", "stamp", lambda: np.ones(2)).tolist() == [1, 1]


def test_bad_pictures_get_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cinic(tmp_path, per_class=1)
    make = lambda: sources.make("cinic10", root=str(tmp_path))  # noqa: E731
    bad = tmp_path / "CINIC-10/train/bird/n00.png"
    blob = bad.read_bytes()
    bad.write_bytes(blob[: len(blob) // 2])
    with pytest.raises(DataError, match=r"bird/n00.png is damaged or not an image"):
        make()
    picture(bad, 33)
    with pytest.raises(DataError, match=r"is 33 by 33 pixels, but 32 by 32 are expected"):
        make()
    bad.write_bytes(blob)
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "sysconf", lambda _: 100)
        with pytest.raises(DataError, match="GB of memory, but there are"):
            make()
    picture(tmp_path / "CINIC-10/test/zebra/n00.png", 32)
    with pytest.raises(DataError, match="other classes than the training images"):
        make()
    (tmp_path / "CINIC-10/test/zebra/n00.png").unlink()
    with pytest.raises(DataError, match="holds no images"):
        make()
    (tmp_path / "CINIC-10" / "test").rename(tmp_path / "CINIC-10" / "elsewhere")
    with pytest.raises(DataError, match=r"expected CINIC-10/test/ in .*datashare.ed.ac.uk.*md5 6ee4d0c9"):
        make()


def tiny(root: Path) -> None:
    home = root / "tiny-imagenet-200"
    for name in ("n01443537", "n01629819"):
        for k in range(3):
            picture(home / "train" / name / "images" / f"{name}_{k}.JPEG", 64, grey=k == 2)
        (home / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t10\t63\t58\n")
    for k in range(2):
        picture(home / "val" / "images" / f"val_{k}.JPEG", 64)
    lines = ["val_0.JPEG\tn01629819\t0\t32\t44\t62", "val_1.JPEG\tn01443537\t52\t55\t57\t59"]
    (home / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    words = ["n00001740\tentity", "n01443537\tgoldfish, Carassius auratus", "n01629819\tEuropean fire salamander, Sal"]
    (home / "words.txt").write_text("\n".join(words) + "\n")


def test_tiny_imagenet(tmp_path: Path) -> None:
    tiny(tmp_path)
    source = sources.make("tiny_imagenet", root=str(tmp_path))
    assert source.train.x.shape == (6, 3, 64, 64)
    assert source.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test.y.tolist() == [1, 0]
    assert source.train.names == ("goldfish", "European fire salamander")
    annotations = tmp_path / "tiny-imagenet-200/val/val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn09999999\t0\t32\t44\t62\n")
    with pytest.raises(DataError, match="names the class n09999999"):
        sources.make("tiny_imagenet", root=str(tmp_path))
    annotations.write_text("val_9.JPEG\tn01443537\t0\t32\t44\t62\n")
    with pytest.raises(DataError, match=r"TinyImageNet is incomplete: there is no file .*val_9.JPEG"):
        sources.make("tiny_imagenet", root=str(tmp_path))


def test_mini_imagenet(tmp_path: Path) -> None:
    home = tmp_path / "mini-imagenet"
    for part, names in (("train", ["n01", "n02"]), ("val", ["n03"]), ("test", ["n04"])):
        rows = ["filename,label"]
        for name in names:
            for k in range(6):
                picture(home / "images" / f"{name}{k:05}.jpg", (84, 84) if k else (120, 90))
                rows.append(f"{name}{k:05}.jpg,{name}")
        (home / f"{part}.csv").write_text("\n".join(rows) + "\n")
    source = sources.make("mini_imagenet", root=str(tmp_path))
    assert source.train.x.shape == (20, 3, 84, 84)
    assert source.test.y.tolist() == [0, 1, 2, 3]
    assert source.train.classes == 4
    few = sources.make("mini_imagenet", root=str(tmp_path), split="classes", size=32)
    assert (set(few.train.y.tolist()), set(few.test.y.tolist())) == ({0, 1, 2}, {3})
    with pytest.raises(ConfigError, match="did you mean 'classes'"):
        sources.make("mini_imagenet", root=str(tmp_path), split="class")
    (home / "val.csv").write_text("file,label\n")
    with pytest.raises(DataError, match=r"val.csv has no column filename; it has file, label"):
        sources.make("mini_imagenet", root=str(tmp_path))


@pytest.mark.parametrize(("name", "channels", "size"), [("dermamnist", 3, 28), ("organcmnist", 1, 64)])
def test_medmnist(name: str, channels: int, size: int, tmp_path: Path) -> None:
    content, classes = {}, 7 if name == "dermamnist" else 11
    for part, n in (("train", 12), ("val", 4), ("test", 6)):
        content[f"{part}_images"] = RNG.integers(
            0, 256, (n, size, size, channels)[: 3 + (channels > 1)], dtype=np.uint8
        )
        content[f"{part}_labels"] = (np.arange(n)[:, None] % classes).astype(np.uint8)
    path = tmp_path / (f"{name}.npz" if size == 28 else f"{name}_{size}.npz")
    np.savez_compressed(path, **content)
    source = sources.make(name, root=str(tmp_path), size=size)
    assert source.train.x.shape == (12, channels, size, size)
    assert source.train.classes == classes
    images = torch.tensor(content["test_images"].reshape(6, size, size, channels)).permute(0, 3, 1, 2)
    torch.testing.assert_close(source.test.x, images / 255 * 2 - 1)
    assert len(sources.make(name, root=str(tmp_path), size=size, validation=True).train) == 16
    with pytest.raises(DataError, match=rf"{name}_224.npz, or medmnist/{name}_224.npz"):
        sources.make(name, root=str(tmp_path), size=224)
    with pytest.raises(ConfigError, match="sizes 28, 64, 128, 224, not 32"):
        sources.make(name, root=str(tmp_path), size=32)
    np.savez(path, **(content | {"train_labels": np.zeros((12, 14), np.uint8)}))
    with pytest.raises(DataError, match="not one label per"):
        sources.make(name, root=str(tmp_path), size=size)
    np.savez(path, **(content | {"train_labels": np.full((12, 1), classes, np.uint8)}))
    with pytest.raises(DataError, match=rf"has label {classes}, but there are {classes} classes"):
        sources.make(name, root=str(tmp_path), size=size)


def test_omniglot(tmp_path: Path) -> None:
    x = np.ones((970, 20, 105, 105), bool)
    x[:5] = RNG.random((5, 20, 105, 105)) < 0.9
    alphabet = np.array(["Greek"] * 3 + ["Latin"] * 961 + ["Tengwar"] * 6)
    np.savez(tmp_path / "omniglot.npz", x=x, alphabet=alphabet)
    source = sources.make("omniglot", root=str(tmp_path), subset="evaluation")
    assert source.train.x.shape == (6 * 16, 1, 28, 28)
    assert source.test.classes == 6
    assert source.group_names == ("Tengwar",)
    by_drawer = sources.make("omniglot", root=str(tmp_path), size=105, alphabets=1, clients="drawers", test=5)
    torch.testing.assert_close(by_drawer.train.x[1, 0], 1 - torch.tensor(x[0, 1], dtype=torch.float32))
    assert len(federate(by_drawer, "natural")) == 15
    assert by_drawer.group_names[0] == "Greek, drawer 01"
    assert set(by_drawer.groups_test).isdisjoint(by_drawer.groups)
    assert by_drawer.train.names == ("Greek 1", "Greek 2", "Greek 3")
    ink = downscale(x[0, :2], 28).astype(float).mean() / 255
    assert ink == pytest.approx(1 - x[0, :2].mean(), abs=2e-3)
    with pytest.raises(ConfigError, match="clients is 'people'"):
        sources.make("omniglot", root=str(tmp_path), clients="people")
    np.savez(tmp_path / "omniglot.npz", x=x[:5].astype(np.uint8), alphabet=alphabet[:5])
    with pytest.raises(DataError, match="does not hold drawings bool"):
        sources.make("omniglot", root=str(tmp_path))


def test_celeba(tmp_path: Path) -> None:
    home = tmp_path / "celeba"
    people = {7: 6, 3: 5, 9: 4}  # the last has too few pictures
    names, owners = [], []
    for person, n in people.items():
        for _ in range(n):
            names.append(f"{len(names) + 1:06}.jpg")
            owners.append(person)
            picture(home / "img_align_celeba" / names[-1], (178, 218))
    smiles = [1 if k % 3 else -1 for k in range(len(names))]
    rows = [f"{name}  1  {smile} -1" for name, smile in zip(names, smiles, strict=True)]
    (home / "list_attr_celeba.txt").write_text("\n".join([str(len(names)), "Bald Smiling Young", *rows]) + "\n")
    (home / "identity_CelebA.txt").write_text("".join(f"{n} {p}\n" for n, p in zip(names, owners, strict=True)))
    source = sources.make("celeba", root=str(tmp_path), size=20)
    assert source.train.x.shape == (11, 3, 20, 20)
    assert source.group_names == ("celebrity 3", "celebrity 7")
    assert source.train.y.tolist() == [(s + 1) // 2 for s in smiles[6:11] + smiles[:6]]
    assert [len(i) for i in federate(source, "natural", held_out=0.0).train.index] == [5, 6]
    assert len(source.test) == 0
    assert sources.make("celeba", root=str(tmp_path), size=20, people=1).group_names == ("celebrity 3",)
    assert sources.make("celeba", root=str(tmp_path), size=20, attribute="Bald").train.y.min() == 1
    with pytest.raises(ConfigError, match="did you mean 'Smiling'"):
        sources.make("celeba", root=str(tmp_path), attribute="Smile")
    (home / "list_attr_celeba.txt").write_text("\n".join([str(len(names)), "Bald Smiling Young", *rows[1:]]) + "\n")
    with pytest.raises(DataError, match="do not list the same images"):
        sources.make("celeba", root=str(tmp_path), size=20)
    (home / "identity_CelebA.txt").write_bytes(b"\xff\xfe1")
    with pytest.raises(DataError, match=r"identity_CelebA.txt is not a text"):
        sources.make("celeba", root=str(tmp_path), size=20)
    with pytest.raises(ConfigError, match="people must be at least 1"):
        sources.make("celeba", root=str(tmp_path), people=0)


def test_isic2019(tmp_path: Path) -> None:
    home = tmp_path / "isic2019"
    head = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"
    rows = []
    for k in range(12):
        onehot = ",".join("1.0" if k % 8 == c else "0.0" for c in range(9))
        fold = "test" if k >= 6 else "train"
        rows.append(f"ISIC_{k:07},{onehot},{k % 8},{k % 6},{fold},{fold}_{k % 6}")
        picture(home / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{k:07}.jpg", (60, 40))
    (home / "train_test_split").write_text("\n".join([head, *rows]) + "\n")
    source = sources.make("isic2019", root=str(tmp_path), size=32)
    assert source.train.x.shape == (6, 3, 32, 32)
    assert source.train.names[1] == "NV"
    federation = federate(source, "natural", held_out="natural")
    assert federation.names[4] == "MSK4"
    assert [len(i) for i in federation.held_out.index] == [1] * 6
    (home / "train_test_split").write_text(f"{head}\n{rows[0].replace('train_0', 'train_1')}\n")
    with pytest.raises(DataError, match="ISIC_0000000 has target 0, centre 0 and fold train_1"):
        sources.make("isic2019", root=str(tmp_path), size=32)


def test_samples_can_be_looked_at(tmp_path: Path) -> None:
    source = sources.make("digits")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_samples(source.train, "digits", tmp_path / "digits.png", per_class=4)
    assert Image.open(tmp_path / "digits.png").size[0] > 300
    with pytest.raises(DataError, match=r"samples of shape \[30\] cannot be drawn"):
        plot_samples(sources.make("synthetic").train, "synthetic", tmp_path / "x.png")


def test_changed_pictures_are_decoded_again_and_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    """Also where a file of the same name has the same size as before."""
    path = tmp_path / "a.png"
    values = []
    for value in (0, 65535, 32896):
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(path, compress_level=0)
        values.append(int(arrays.read_images("mine", [path], 4, tmp_path / "cache.npz")[0, 0, 0, 0]))
    assert values == [0, 255, 128]


@pytest.mark.parametrize("suffix", [".bmp", ".webp", ".tif"])
def test_folders_hold_pictures_of_other_formats_too(suffix: str, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        picture(tmp_path / name / f"one{suffix}", 8)
    paths, y, names = arrays.by_class(tmp_path)
    assert ([path.suffix for path in paths], y.tolist(), names) == ([suffix] * 2, [0, 1], ["cat", "dog"])


def test_pixels_of_floats_are_refused_where_they_would_turn_black(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((8, 8), 0.5, dtype=np.float32)).save(tmp_path / name / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif has floats for pixels, whose range is not known; save it with 8 or"):
        sources.make("folder", path=str(tmp_path))
