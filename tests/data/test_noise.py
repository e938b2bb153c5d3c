"""Label noise follows its transition matrix, in the training rows and nowhere else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.base.errors import ConfigError, DataError
from fedloom.data import federate, from_tensors, noises
from fedloom.data.labels import LabelNoise, PairNoise, Symmetric


@given(st.integers(1, 50), st.floats(0, 1))
def test_matrices_are_stochastic_and_what_the_papers_print(classes: int, rate: float) -> None:
    for noise in (LabelNoise(), PairNoise(rate), Symmetric(rate)):
        t = noise.matrix(classes)
        assert t.min() >= 0
        assert np.allclose(t.sum(1), 1)
    if classes > 2:
        pair, symmetric = PairNoise(rate).matrix(classes), Symmetric(rate).matrix(classes)
        for i in range(classes):
            for j in range(classes):
                assert pair[i, j] == pytest.approx(1 - rate if i == j else rate if j == (i + 1) % classes else 0)
                assert symmetric[i, j] == pytest.approx(1 - rate if i == j else rate / (classes - 1))


@pytest.mark.parametrize("noise", [PairNoise(0.1), PairNoise(0.4), Symmetric(0.2), Symmetric(0.6)], ids=repr)
def test_drawn_labels_follow_the_matrix(noise: LabelNoise) -> None:
    """Chi-square of all 10 x 10 counts against the matrix, and nothing where the matrix is zero."""
    samples = 60_000
    y = torch.arange(samples) % 10
    source = from_tensors(torch.zeros(samples, 1), y)
    federation = federate(source, "dirichlet_balanced", 100, seed=5, noise=noise, held_out=0.2, validation=0.1)
    rows = federation.train.index.rows
    true, noisy = y.numpy()[rows], federation.train.arrays.y.numpy()[rows]
    counts = np.bincount(true * 10 + noisy, minlength=100).reshape(10, 10)
    expected = noise.matrix(10) * counts.sum(1, keepdims=True)
    assert (counts[expected == 0] == 0).all()
    here = expected > 0
    freedom = here.sum() - 10
    surprise = ((counts - expected)[here] ** 2 / expected[here]).sum()
    assert surprise < freedom + 4 * np.sqrt(2 * freedom)
    record = federation.provenance["noise"]
    assert record == {**noises.describe(noise), "wrong": int((true != noisy).sum())}


def test_only_training_labels_are_wrong_and_inputs_are_shared() -> None:
    y = torch.arange(1000) % 10
    source = from_tensors(torch.zeros(1000, 1), y, x_test=torch.zeros(100, 1), y_test=torch.arange(100) % 10)
    clean, noisy = (federate(source, "iid", 10, validation=0.1, noise=n) for n in ("none", Symmetric(1.0)))
    assert clean.train.arrays is source.train
    assert noisy.train.arrays.x is source.train.x
    assert noisy.validation.arrays is source.train
    assert noisy.held_out.arrays is source.train
    assert noisy.test is source.test
    assert torch.equal(source.train.y, y)
    wrong = (noisy.train.arrays.y != y).numpy()
    rows = np.zeros(1000, dtype=bool)
    rows[noisy.train.index.rows] = True
    assert np.array_equal(wrong, rows)  # with rate 1 every training label is another one, and no other label is
    assert np.array_equal(clean.train.index.rows, noisy.train.index.rows)  # who holds what does not depend on noise
    again = federate(source, "iid", 10, validation=0.1, noise=Symmetric(1.0))
    assert torch.equal(again.train.arrays.y, noisy.train.arrays.y)


def test_bad_noise_gets_one_sentence() -> None:
    assert noises.names() == ["none", "pair", "symmetric"]
    with pytest.raises(ConfigError, match="did you mean 'symmetric'"):
        federate("digits", "iid", 5, noise="symetric")
    with pytest.raises(DataError, match="label noise reads class numbers"):
        federate(from_tensors(torch.zeros(9, 1), torch.rand(9)), "iid", 3, noise="pair")
