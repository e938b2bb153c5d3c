"""Images in folders by class, and by client and class."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.deaths import child, end
from PIL import Image

from fedloom import FedLoomError
from fedloom.config import resolve
from fedloom.config.keys import build_federation
from fedloom.core.federation import Federation
from fedloom.data.sources import arrays

RNG = np.random.default_rng(0)


def test_a_folder_of_images_is_decoded_once(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (6, 10, 10, 3)).astype(np.uint8)
    for row, (part, kind) in enumerate((p, k) for p in ("train", "test") for k in ("cat", "dog", "fox")):
        home = tmp_path / part / kind
        home.mkdir(parents=True)
        Image.fromarray(pixels[row]).save(home / "0.png")
    config = resolve([f"data=folder:{tmp_path}", "data.size=10", "partition=iid", "clients=3"])
    federation = build_federation(config)
    assert federation.train.arrays.names == ("cat", "dog", "fox")
    np.testing.assert_allclose(federation.test.x.numpy(), pixels[3:].transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    caches = sorted(tmp_path.glob("*/fedloom-*.npy"))
    before = [path.stat().st_mtime_ns for path in caches]
    build_federation(config)
    assert [path.stat().st_mtime_ns for path in caches] == before
    assert len(caches) == 2


def test_two_processes_that_decode_a_folder_at_once_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins and is killed, and this one still has all of its images."""
    for value in (100, 150, 200):
        write_image(tmp_path / "cat" / f"{value}.png", value)
    read, exit_codes = arrays.read_image, []

    def half() -> None:
        monkeypatch.setattr(
            arrays, "read_image", lambda path, *rest: end() if "150" in path.name else read(path, *rest)
        )
        build()

    def first(path: Path, *rest: Any) -> np.ndarray:
        if not exit_codes:
            exit_codes.append(child(half))
        return read(path, *rest)

    def build() -> Federation:
        return build_federation(resolve([f"data=folder:{tmp_path}", "data.size=8", "partition=iid", "clients=1"]))

    monkeypatch.setattr(arrays, "read_image", first)
    x = build().train.arrays.x
    assert exit_codes == [-signal.SIGKILL]
    assert [round(255 * float(image.mean())) for image in x] == [100, 150, 200]


def write_image(place: Path, value: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(place)


def test_images_for_validation_are_dealt_to_the_clients(tmp_path: Path) -> None:
    for value, part in enumerate(("train", "valid")):
        for kind in ("cat", "dog"):
            for number in range(4):
                write_image(tmp_path / part / kind / f"{number}.png", 100 * value)
    federation = build_federation(resolve([f"data=folder:{tmp_path}", "data.size=8", "partition=iid", "clients=2"]))
    assert len(federation.validation.index.rows) == 8
    assert not federation.train.arrays.x.any()
    assert federation.validation.arrays.x.all()
    assert not len(federation.test)  # clients are evaluated on training images that they hold out


def test_folders_of_clients_hold_those_of_their_classes(tmp_path: Path) -> None:
    """Clients may lack classes; which images are whose is told by their grey, client by client."""
    for k, (client, kind) in enumerate(
        [("ann", "cat"), ("ann", "fox"), ("bob", "dog"), ("bob", "cat"), ("eve", "fox")]
    ):
        for i in range(3):
            write_image(tmp_path / "train" / client / kind / f"{i}.png", 10 * k + i)
        write_image(tmp_path / "test" / client / kind / "0.png", 10 * k + 5)
        write_image(tmp_path / "val" / client / kind / "0.png", 10 * k + 7)
    words = [f"data=folder:{tmp_path}", "data.size=8", "held_out=natural"]
    federation = build_federation(resolve([*words, "data.by_client=true"]))
    assert federation.names == ("ann", "bob", "eve")
    assert federation.train.arrays.names == ("cat", "dog", "fox")
    for split, greys in ((federation.train, range(3)), (federation.held_out, [5]), (federation.validation, [7])):
        for client, owned in enumerate([{0: 0, 1: 2}, {2: 1, 3: 0}, {4: 2}]):
            samples = split.client(client)
            greys_and_classes = {
                (round(255 * float(x.mean())), int(y)) for x, y in zip(samples.x, samples.y, strict=True)
            }
            assert greys_and_classes == {(10 * k + i, kind) for k, kind in owned.items() for i in greys}
    with pytest.raises(FedLoomError, match=r"contain folders; if .* set data\.by_client=true"):
        build_federation(resolve([*words, "partition=iid"]))
    write_image(tmp_path / "val" / "eve" / "yak" / "0.png", 1)
    with pytest.raises(FedLoomError, match="val has the class 'yak', which train has not"):
        build_federation(resolve([*words, "data.by_client=true"]))


def test_two_folders_for_validation_are_refused(tmp_path: Path) -> None:
    for part in ("train", "val", "valid"):
        write_image(tmp_path / part / "cat" / "0.png", 100)
    with pytest.raises(FedLoomError, match="has several folders for validation, val, valid; join them"):
        build_federation(resolve([f"data=folder:{tmp_path}", "data.size=8", "partition=iid", "clients=1"]))


def test_hidden_folders_beside_images_are_not_clients_folders(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "0.png", 100)
    (tmp_path / "cat" / ".ipynb_checkpoints").mkdir()
    federation = build_federation(resolve([f"data=folder:{tmp_path}", "data.size=8", "partition=iid", "clients=1"]))
    assert len(federation.train.arrays) == 1
