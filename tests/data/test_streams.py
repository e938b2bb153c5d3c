"""Task streams: seeded, indexable, lazy, and using each sample once before any is used twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data import from_tensors, sources
from fedloom.data.sources import Source
from fedloom_apps.online.streams import (
    InOrder,
    KWay,
    NaturalTasks,
    SMnist,
    Task,
    TaskStream,
    Transformed,
    s_mnist_change,
    streams,
    task_stream,
    transform_images,
)


def source(classes: int = 10, train: int = 60, test: int = 20) -> Source:
    """Inputs are row numbers (negative in the test set), so that samples can be followed."""
    y, v = (torch.arange(n * classes) % classes for n in (train, test))
    x, u = torch.arange(float(train * classes)), -1 - torch.arange(float(test * classes))
    return from_tensors(x[:, None], y, x_test=u[:, None], y_test=v, classes=classes)


def same(a: Task, b: Task) -> bool:
    return all(
        torch.equal(getattr(getattr(a, split), part), getattr(getattr(b, split), part))
        for split in ("train", "test")
        for part in ("x", "y")
    )


@settings(max_examples=25)
@given(st.integers(2, 20), st.integers(1, 6), st.booleans(), st.integers(1, 30), st.integers(0, 50))
def test_k_way_laws(classes: int, ways: int, overlap: bool, size: int, seed: int) -> None:
    pool = source(classes)
    kind = KWay(ways, 12 if overlap else 0, train=size, test=ways, overlap=overlap)
    if ways > classes:
        with pytest.raises(DataError, match="available classes"):
            task_stream(pool, kind, seed)
        return
    stream = task_stream(pool, kind, seed)
    assert len(stream) == (12 if overlap else classes // ways)
    task_classes: list[int] = []
    for task in stream:
        assert task.train.classes == task.test.classes == ways == len(set(task.classes))
        task_classes += task.classes
        for split, full, n in ((task.train, pool.train, size), (task.test, pool.test, ways)):
            rows = split.x[:, 0].long()
            rows = rows if split is task.train else -1 - rows
            assert len(split) == n == len(rows.unique())
            assert torch.equal(torch.tensor(task.classes)[split.y], full.y[rows])  # labels name the task's classes
            counts = np.bincount(split.y.numpy(), minlength=ways)
            assert counts.max() - counts.min() <= 1
    assert overlap or len(set(task_classes)) == len(task_classes)
    number = len(stream) // 2
    assert same(stream[number], stream[number])
    assert same(task_stream(pool, kind, seed)[number], stream[number])  # whatever was asked for before
    assert same(stream[number:][0], stream[number])


def test_uneven_tasks_use_every_sample_of_a_class_before_one_comes_again() -> None:
    """Of seven samples of two classes, the first has four and the second three."""
    pool = source(train=20, test=20)
    stream = task_stream(pool, KWay(2, 60, train=7, test=7))
    times = np.zeros(len(pool.train), dtype=int)
    for task in stream:
        times[task.train.x[:, 0].long().numpy()] += 1
        for c in task.classes:
            assert np.ptp(times[pool.train.y.numpy() == c]) <= 1
    assert times.max() > 1


def test_samples_come_again_only_when_all_of_their_class_have_come() -> None:
    pool = source(train=60, test=10)
    stream = task_stream(pool, KWay(10, 15, train=60, test=10), 3)
    rows = np.concatenate([task.train.x[:, 0].long().numpy() for task in stream])
    assert np.array_equal(np.sort(rows[:600]), np.arange(600))
    assert np.bincount(rows).max() == 2


def test_overlapping_tasks_use_every_class_and_other_seeds_are_other_streams() -> None:
    pool = source(100, 5, 5)
    a, b = (task_stream(pool, KWay(5, 200, 5, 5), seed) for seed in (0, 1))
    assert len({c for task in a for c in task.classes}) == 100
    assert [task.classes for task in a[:5]] != [task.classes for task in b[:5]]
    assert len({task.classes for task in a}) > 190


def test_indices_work_like_a_sequence() -> None:
    stream = task_stream("digits", KWay(3, 7, 9, 3))
    assert stream[-1].number == 6
    assert [task.number for task in stream[1:6:2]] == [1, 3, 5]
    assert sum(1 for _ in stream) == 7
    with pytest.raises(IndexError):
        stream[7]


def by_hand(image: np.ndarray, turn: int, flip: int, shrink: int, shift: int) -> np.ndarray:
    """The change of one image [28, 28], in NumPy from its description."""
    image = np.rot90(image, turn)
    image = (image, image[:, ::-1], image[::-1])[flip]
    if shrink:
        border = np.concatenate([image[0], image[-1], image[1:-1, 0], image[1:-1, -1]])
        small = image[1:27, 1:27].reshape(13, 2, 13, 2).mean((1, 3))
        image = np.full((28, 28), border.mean())
        image[7:20, 7:20] = small
    if shift:
        down, right = ((0, -4), (0, 4), (-4, 0), (4, 0))[shift - 1]
        padded = np.pad(image, 4)
        image = padded[4 - down : 32 - down, 4 - right : 32 - right]
    return image


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("flip", range(3))
def test_the_authors_s_mnist_by_hand(turn: int, flip: int) -> None:
    x = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    for shrink, shift in np.ndindex(2, 5):
        expected = np.stack([by_hand(image[0].numpy(), turn, flip, shrink, shift) for image in x])
        np.testing.assert_allclose(s_mnist_change(x, turn, flip, shrink, shift)[:, 0].numpy(), expected, atol=1e-12)


def test_s_mnist_deals_samples_as_they_come_and_changes_classes() -> None:
    pool = sources.make("digits")
    stream = task_stream(pool, SMnist(tasks=40), seed=2)
    assert len(stream) == 40
    assert {tuple(task.train.x.shape) for task in stream} == {(60, 1, 8, 8)}
    counts = [np.bincount(task.train.y.numpy(), minlength=10).tolist() for task in stream]
    assert len({tuple(c) for c in counts}) > 30  # classes are as frequent as chance has it
    assert np.sum(counts[: len(pool.train) // 60], 0).max() <= np.bincount(pool.train.y.numpy()).max()
    task = stream[3]
    how = {name: value.tolist() for name, value in task.about.items()}
    for split, full in ((task.train, pool.train), (task.test, pool.test)):
        for x, y in zip(split.x, split.y.tolist(), strict=True):
            changed = s_mnist_change(full.x[full.y == y], **{name: value[y] for name, value in how.items()})
            assert (changed - x).abs().amax((1, 2, 3)).min() == 0
    ranges = {"turn": 4, "flip": 3, "shrink": 2, "shift": 5}
    assert {k: set(np.concatenate([t.about[k] for t in stream])) for k in how} == {
        k: set(range(n)) for k, n in ranges.items()
    }
    assert same(stream[3], task_stream(pool, SMnist(tasks=40), seed=2)[3])


def people() -> Source:
    """Ann has 30 samples, Bob 8, Cid 20 and two test samples; inputs are row numbers, Ann's and Cid's by turns."""
    ids = ["ann", "cid"] * 20 + ["ann"] * 10 + ["bob"] * 8
    y = torch.arange(58) % 3
    tests = {"x_test": -1.0 - torch.arange(5)[:, None], "y_test": torch.arange(5) % 3}
    test_owners = ["dan", "dan", "dan", "cid", "cid"]
    return from_tensors(torch.arange(58.0)[:, None], y, clients=ids, clients_test=test_owners, classes=3, **tests)


def test_each_person_is_a_task() -> None:
    pool = people()
    stream = task_stream(pool, NaturalTasks(train=18, test=2), seed=3)
    assert len(stream) == 2  # Bob has too few samples, Dan has none to learn from
    owners = np.array(pool.group_names)[pool.groups]
    test_rows = {}
    for task in stream:
        rows = task.train.x[:, 0].long().numpy()
        (who,) = set(owners[rows])
        assert len(set(rows)) == 18
        assert torch.equal(task.train.y, pool.train.y[rows])
        tests = task.test.x[:, 0].long().numpy()
        assert not set(tests) & set(rows)
        test_rows[who] = tests
    assert set(test_rows["cid"]) == {-4, -5}  # the test samples of his own
    assert set(owners[test_rows["ann"]]) == {"ann"}
    assert same(stream[1], task_stream(pool, NaturalTasks(train=18, test=2), seed=3)[1])
    assert (
        len({task_stream(pool, NaturalTasks(train=18, test=2), seed)[0].train.y.sum().item() for seed in range(9)}) > 1
    )


def test_data_in_order_make_tasks_of_what_follows() -> None:
    pool = people()
    stream = task_stream(pool, InOrder(train=6, test=4))
    assert [task.train.x[:, 0].tolist() + task.test.x[:, 0].tolist() for task in stream] == [
        list(range(at, at + 10)) for at in range(0, 50, 10)
    ]
    by_client = task_stream(pool, InOrder(train=6, test=4, by_client=True))
    rows = [task.train.x[:, 0].long().tolist() + task.test.x[:, 0].long().tolist() for task in by_client]
    assert [r[-1] for r in rows] == [18, 19, 38, 39, 49]  # each when its last sample has come
    owners = np.array(pool.group_names)[pool.groups]
    assert [set(owners[r]) for r in rows] == [{"ann"}, {"cid"}, {"ann"}, {"cid"}, {"ann"}]
    assert len(task_stream(pool, InOrder(tasks=2, train=6, test=4))) == 2


def test_ranges_transform_each_class_in_its_own_way() -> None:
    pool = sources.make("digits")
    stream = task_stream(pool, "transformed", seed=2)
    assert len(stream) == 1000
    for number in (0, 999):
        task = stream[number]
        assert np.bincount(task.train.y.numpy()).tolist() == [6] * 10
        assert np.bincount(task.test.y.numpy()).tolist() == [1] * 10
        assert task.classes == tuple(range(10))
        how = {name: torch.from_numpy(value).float() for name, value in task.about.items()}
        black = torch.zeros(1, 1, 1)
        matches = 0
        for x, y in zip(task.train.x, task.train.y, strict=True):
            originals = pool.train.x[pool.train.y == y]
            parameters = {name: value[y].expand(len(originals), *value.shape[1:]) for name, value in how.items()}
            matches += int((transform_images(originals, parameters, black) - x).abs().amax((1, 2, 3)).min() < 1e-6)
        assert matches == 60  # every image is one of its class, changed as its class is
    assert len({tuple(stream[0].about["rotation"]), tuple(stream[1].about["rotation"])}) == 2
    turned = np.concatenate([stream[n].about["rotation"] for n in range(100)])
    assert set(turned) == {0.0, 90.0, 180.0, 270.0}
    flips = np.concatenate([stream[n].about["flip"] for n in range(100)])
    assert {tuple(f) for f in flips} == {(1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)}


def test_turns_and_flips_are_exact_and_crops_and_scales_are_as_large_as_they_say() -> None:
    x = torch.rand(1, 1, 8, 8)
    plain = {
        "rotation": torch.zeros(1), "flip": torch.ones(1, 2), "crop": torch.ones(1),
        "corner": torch.zeros(1, 2), "scale": torch.ones(1),
    }  # fmt: skip
    black = torch.full((1, 1, 1), -0.4)
    for changed, expected in (
        ({}, x),
        ({"rotation": torch.tensor([90.0])}, torch.rot90(x, 1, (2, 3))),
        ({"rotation": torch.tensor([180.0])}, torch.rot90(x, 2, (2, 3))),
        ({"flip": torch.tensor([[-1.0, 1.0]])}, x.flip(3)),
        ({"flip": torch.tensor([[1.0, -1.0]])}, x.flip(2)),
    ):
        torch.testing.assert_close(transform_images(x, plain | changed, black), expected, atol=1e-5, rtol=0)
    small = transform_images(torch.ones(1, 1, 8, 8), plain | {"scale": torch.tensor([0.5])}, black)
    assert (small[0, 0, 2:6, 2:6] > 0.9).all()
    assert small.sum() == pytest.approx(16 - 0.4 * 48)
    columns = torch.arange(8.0).expand(1, 1, 8, 8)
    window = transform_images(
        columns, plain | {"crop": torch.tensor([0.5]), "corner": torch.tensor([[0.5, 0.0]])}, black
    )
    torch.testing.assert_close(window[0, 0, 3, :7], 3.75 + 0.5 * torch.arange(7.0))  # the right half, twice as large
    upper_left = plain | {"crop": torch.tensor([0.25]), "corner": torch.tensor([[-0.5, -0.5]])}
    corner = transform_images(torch.eye(8)[None, None].flip(3), upper_left, torch.zeros(1, 1, 1))
    assert corner.abs().max() == 0  # of the other diagonal nothing is there


def test_anyones_sequence_is_a_stream() -> None:
    requests: list[int] = []

    class Lazy(list[tuple[Arrays, Arrays]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, number):  # type: ignore[no-untyped-def, override]
            requests.append(number)
            arrays = Arrays(torch.full((2, 1), float(number)), torch.tensor([0, 1]), 2)
            return arrays, arrays

    stream = TaskStream.of(Lazy())
    assert not requests  # nothing is made before it is asked for
    assert float(stream[2].train.x[0]) == 2
    assert requests == [2]
    assert [task.number for task in stream] == [0, 1, 2, 3]


def test_what_cannot_be_gets_one_sentence() -> None:
    assert streams.names() == ["s_mnist", "transformed", "k_way", "natural", "in_order"]
    pool = source(10, 20, 5)
    with pytest.raises(DataError, match="10 classes give 3 tasks of 3 without overlap, not 4"):
        task_stream(pool, KWay(3, 4, 9, 3, overlap=False))
    with pytest.raises(DataError, match="a training set needs 21 samples of class 0, which has 20"):
        task_stream(pool, KWay(1, 200, 21, 1))
    with pytest.raises(DataError, match="a test set needs 6 samples"):
        task_stream(pool, KWay(1, 200, 1, 6))
    with pytest.raises(DataError, match="needs images"):
        task_stream(pool, Transformed())
    with pytest.raises(DataError, match="turns square images"):
        task_stream(pool, SMnist())
    with pytest.raises(DataError, match="needs 1798 samples, of which there are"):
        task_stream("digits", SMnist(train=1798))
    with pytest.raises(DataError, match="has no natural clients to make tasks of"):
        task_stream(pool, NaturalTasks())
    with pytest.raises(DataError, match="0 of 4 natural clients have the 40 training and 10 test samples"):
        task_stream(people(), NaturalTasks())
    with pytest.raises(DataError, match=r"58 samples make 5 tasks of 6 \+ 4, but 6 are needed"):
        task_stream(people(), InOrder(6, 6, 4))
    with pytest.raises(DataError, match="class numbers"):
        task_stream(
            from_tensors(torch.zeros(9, 1), torch.rand(9), x_test=torch.zeros(2, 1), y_test=torch.rand(2), classes=5),
            KWay(1),
        )
    with pytest.raises(ConfigError, match="crop must be two numbers"):
        Transformed(crop=(0.5, 1.5))
