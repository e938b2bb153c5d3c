"""Task streams: seeded, indexable, made when asked for, and dealing each sample once before any twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Arrays
from fedloom.data import from_tensors, sources, streams, task_stream
from fedloom.data.sources import Source
from fedloom.data.streams import KWay, Task, TaskStream, Transformed
from fedloom.data.streams.kinds import transformed


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
        with pytest.raises(DataError, match="cannot be made from"):
            task_stream(pool, kind, seed)
        return
    stream = task_stream(pool, kind, seed)
    assert len(stream) == (12 if overlap else classes // ways)
    seen: list[int] = []
    for task in stream:
        assert task.train.classes == task.test.classes == ways == len(set(task.classes))
        seen += task.classes
        for split, full, n in ((task.train, pool.train, size), (task.test, pool.test, ways)):
            rows = split.x[:, 0].long()
            rows = rows if split is task.train else -1 - rows
            assert len(split) == n == len(rows.unique())
            assert torch.equal(torch.tensor(task.classes)[split.y], full.y[rows])  # labels name the task's classes
            counts = np.bincount(split.y.numpy(), minlength=ways)
            assert counts.max() - counts.min() <= 1
    assert overlap or len(set(seen)) == len(seen)
    number = len(stream) // 2
    assert same(stream[number], stream[number])
    assert same(task_stream(pool, kind, seed)[number], stream[number])  # whatever was asked for before
    assert same(stream[number:][0], stream[number])


def test_samples_come_again_only_when_all_of_their_class_have_come() -> None:
    pool = source(train=60, test=10)
    stream = task_stream(pool, Transformedless(tasks=15, train=60, test=10), 3)
    rows = np.concatenate([task.train.x[:, 0].long().numpy() for task in stream])
    assert np.array_equal(np.sort(rows[:600]), np.arange(600))
    assert np.bincount(rows).max() == 2


class Transformedless(Transformed):
    """All classes in every task, as they are."""

    def change(self, x, y, arrays, ways, draw):  # type: ignore[no-untyped-def]
        return x, {}


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


def test_s_mnist_transforms_each_class_in_its_own_way() -> None:
    pool = sources.make("digits")
    stream = task_stream(pool, "s_mnist", seed=2)
    assert len(stream) == 1000
    for number in (0, 999):
        task = stream[number]
        assert np.bincount(task.train.y.numpy()).tolist() == [6] * 10
        assert np.bincount(task.test.y.numpy()).tolist() == [1] * 10
        assert task.classes == tuple(range(10))
        how = {name: torch.from_numpy(value).float() for name, value in task.about.items()}
        black = torch.zeros(1, 1, 1)
        found = 0
        for x, y in zip(task.train.x, task.train.y, strict=True):
            originals = pool.train.x[pool.train.y == y]
            mine = {name: value[y].expand(len(originals), *value.shape[1:]) for name, value in how.items()}
            found += int((transformed(originals, mine, black) - x).abs().amax((1, 2, 3)).min() < 1e-6)
        assert found == 60  # every image is one of its class, changed as its class is
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
        torch.testing.assert_close(transformed(x, plain | changed, black), expected, atol=1e-5, rtol=0)
    small = transformed(torch.ones(1, 1, 8, 8), plain | {"scale": torch.tensor([0.5])}, black)
    assert (small[0, 0, 2:6, 2:6] > 0.9).all()
    assert small.sum() == pytest.approx(16 - 0.4 * 48)
    columns = torch.arange(8.0).expand(1, 1, 8, 8)
    window = transformed(columns, plain | {"crop": torch.tensor([0.5]), "corner": torch.tensor([[0.5, 0.0]])}, black)
    torch.testing.assert_close(window[0, 0, 3, :7], 3.75 + 0.5 * torch.arange(7.0))  # the right half, twice as large
    upper_left = plain | {"crop": torch.tensor([0.25]), "corner": torch.tensor([[-0.5, -0.5]])}
    corner = transformed(torch.eye(8)[None, None].flip(3), upper_left, torch.zeros(1, 1, 1))
    assert corner.abs().max() == 0  # of the other diagonal nothing is there


def test_anyones_sequence_is_a_stream() -> None:
    made: list[int] = []

    class Lazy(list[tuple[Arrays, Arrays]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, number):  # type: ignore[no-untyped-def, override]
            made.append(number)
            arrays = Arrays(torch.full((2, 1), float(number)), torch.tensor([0, 1]), 2)
            return arrays, arrays

    stream = TaskStream.of(Lazy())
    assert not made  # nothing is made before it is asked for
    assert float(stream[2].train.x[0]) == 2
    assert made == [2]
    assert [task.number for task in stream] == [0, 1, 2, 3]


def test_what_cannot_be_gets_one_sentence() -> None:
    assert streams.names() == ["s_mnist", "k_way"]
    pool = source(10, 20, 5)
    with pytest.raises(DataError, match="10 classes give 3 tasks of 3 without overlap, not 4"):
        task_stream(pool, KWay(3, 4, 9, 3, overlap=False))
    with pytest.raises(DataError, match="a training set needs 21 samples of class 0, which has 20"):
        task_stream(pool, KWay(1, 200, 21, 1))
    with pytest.raises(DataError, match="a test set needs 6 samples"):
        task_stream(pool, KWay(1, 200, 1, 6))
    with pytest.raises(DataError, match="needs images"):
        task_stream(pool, Transformed())[0]
    with pytest.raises(DataError, match="class numbers"):
        task_stream(
            from_tensors(torch.zeros(9, 1), torch.rand(9), x_test=torch.zeros(2, 1), y_test=torch.rand(2), classes=5),
            KWay(1),
        )
    with pytest.raises(ConfigError, match="ways must be at least 1"):
        KWay(0)
    with pytest.raises(ConfigError, match="crop must be two numbers"):
        Transformed(crop=(0.5, 1.5))
