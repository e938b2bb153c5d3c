"""Losses and layers against independent NumPy derivations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.distilling import Problem
from torch import Tensor, nn

from fedloom_apps.distill import FeatureTap, SGDConfig, disk, fitnet, kd, semckd, simkd
from fedloom_apps.distill.learner import make_learner
from fedloom_apps.distill.method import GuideNet, NetworkPair, Outputs, Sizes
from fedloom_apps.distill.methods import (
    AttentionLayers,
    Hint,
    Labels,
    Response,
    Reuse,
    SelectiveResponse,
    SelectiveReuse,
    SemanticAttention,
)

N, C = 6, 4


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def pair() -> NetworkPair:
    """What two networks with two maps each say."""
    draw = torch.Generator().manual_seed(3)

    def random_outputs(width: int, sizes: list[tuple[int, int]]) -> Outputs:
        maps = tuple(torch.rand(N, c, s, s, generator=draw, dtype=torch.float64) for c, s in sizes)
        logits = torch.randn(N, C, generator=draw, dtype=torch.float64)
        return Outputs(logits, torch.randn(N, width, generator=draw, dtype=torch.float64), maps)

    return NetworkPair(random_outputs(5, [(2, 8), (3, 4)]), random_outputs(7, [(4, 8), (6, 2)]), torch.arange(N) % C)


def convolved(x: np.ndarray, layer: nn.Module) -> np.ndarray:
    """A convolution without stride, by loops over the kernel."""
    assert isinstance(layer, nn.Conv2d)
    w = layer.weight.detach().numpy()
    p = w.shape[2] // 2
    wide = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    height, width = x.shape[2:]
    out = sum(
        np.einsum("nchw,oc->nohw", wide[:, :, i : i + height, j : j + width], w[:, :, i, j])
        for i in range(w.shape[2])
        for j in range(w.shape[3])
    )
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()[:, None, None]
    return np.asarray(out + bias)


def normalised(x: np.ndarray) -> np.ndarray:
    """Batch normalisation as it starts: mean 0, variance 1 over the batch."""
    axes = (0, *range(2, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def shrunk(x: np.ndarray, size: int) -> np.ndarray:
    n, c, h, _ = x.shape
    k = h // size
    return x.reshape(n, c, size, k, size, k).mean((3, 5))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def through(x: np.ndarray, layers: nn.Module) -> np.ndarray:
    """Convolution, normalisation, ReLU, as often as they come."""
    for layer in layers.children():
        if isinstance(layer, nn.Conv2d):
            x = convolved(x, layer)
        elif isinstance(layer, nn.Linear):
            x = x @ layer.weight.detach().numpy().T + (0 if layer.bias is None else layer.bias.detach().numpy())
        else:
            x = normalised(x) if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d) else relu(x)
    return x


def close(actual: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def numpy(t: Tensor) -> np.ndarray:
    return t.detach().numpy()


def test_labels_and_answers(pair: NetworkPair):
    s, t = numpy(pair.student.logits), numpy(pair.guidance.logits)
    close(Labels(0.5).loss(pair, None), -0.5 * np.log(softmax(s)[np.arange(N), numpy(pair.y)]))
    a, b = softmax(t / 3), softmax(s / 3)
    close(Response(2.0, tau=3.0).loss(pair, None), 2 * 9 * (a * np.log(a / b)).sum(1))


def test_selective_answers(pair: NetworkPair):
    s, t = numpy(pair.student.logits), numpy(pair.guidance.logits)
    g = np.linspace(0, 1, N)
    a, b = softmax(t / 4), softmax(s / 2)
    for i in range(N):
        b[i, np.argsort(-t[i])[:2]] += g[i]
    expected = -4 * 2 * (a * np.log(b)).sum(1)
    close(SelectiveResponse(1.0, 4.0, None, 2).loss(pair, None, torch.from_numpy(g), tau_s=2.0), expected)
    close(SelectiveResponse(1.0, 4.0, 2.0, 2).loss(pair, None, torch.from_numpy(g), tau_s=9.0), expected)


def test_hint(pair: NetworkPair):
    term = Hint(3.0, layer=-1)
    layers = term.layers(sizes(pair.student), sizes(pair.guidance), N)
    assert layers is not None
    layers.double()
    came = through(shrunk(numpy(pair.student.maps[1]), 2), layers.body)  # type: ignore[arg-type]
    expected = 3 * ((came - numpy(pair.guidance.maps[1])) ** 2).mean((1, 2, 3))
    close(term.loss(pair, layers), expected)


def test_reused_head_on_features(pair: NetworkPair):
    term = Reuse(2.0)
    layers = term.layers(sizes(pair.student), sizes(pair.guidance), N)
    assert layers is not None
    layers.double()
    d = ((through(numpy(pair.student.features), layers) - numpy(pair.guidance.features)) ** 2).mean(1)
    close(term.loss(pair, layers), 2 * d)
    g = np.linspace(0, 1, N)
    close(SelectiveReuse(2.0).loss(pair, layers, torch.from_numpy(g)), 2 * (1 - g) * d)


def test_reused_head_on_maps(pair: NetworkPair):
    term = Reuse()
    student, teacher = sizes(pair.student)._replace(pooled=True), sizes(pair.guidance)._replace(pooled=True)
    layers = term.layers(student, teacher, N)
    assert layers is not None
    layers.double()
    came = through(shrunk(numpy(pair.student.maps[1]), 2), layers.body)  # type: ignore[arg-type]
    close(term.loss(pair, layers), ((came - numpy(pair.guidance.maps[1])) ** 2).mean((1, 2, 3)))
    close(term.features(pair.student, layers), came.mean((2, 3)))


def test_attention(pair: NetworkPair):
    term = SemanticAttention(2.0, width=5)
    layers = term.layers(sizes(pair.student), sizes(pair.guidance), N + 2)
    assert isinstance(layers, AttentionLayers)
    layers.double()

    def embedded(maps: Tensor, mlp: nn.Module) -> np.ndarray:
        flat = numpy(maps).reshape(N, -1)
        similar = flat @ flat.T
        rows = np.concatenate([similar / np.linalg.norm(similar, axis=1, keepdims=True), np.zeros((N, 2))], 1)
        first, _, second = mlp.children()
        out = relu(rows @ numpy(first.weight).T + numpy(first.bias)) @ numpy(second.weight).T + numpy(second.bias)  # type: ignore[arg-type]
        return out / np.linalg.norm(out, axis=1, keepdims=True)

    queries = np.stack([embedded(m, q) for m, q in zip(pair.student.maps, layers.queries, strict=True)], 1)
    keys = np.stack([embedded(m, k) for m, k in zip(pair.guidance.maps, layers.keys, strict=True)], 1)
    alpha = softmax(np.einsum("nsw,ntw->nst", queries, keys))
    close(layers.weights(pair.student.maps, pair.guidance.maps), alpha)
    expected = np.zeros(N)
    for i, s in enumerate(pair.student.maps):
        for j, t in enumerate(pair.guidance.maps):
            size = min(s.shape[2], t.shape[2])
            body = layers.projections[i][j].body  # type: ignore[index]
            came = through(shrunk(numpy(s), size), body)
            expected += alpha[:, i, j] * ((came - shrunk(numpy(t), size)) ** 2).mean((1, 2, 3))
    close(term.loss(pair, layers), 2 * expected / 2)


def sizes(outputs: Outputs) -> Sizes:
    maps = tuple((m.shape[1], m.shape[2], m.shape[3]) for m in outputs.maps)
    return Sizes(outputs.logits.shape[1], outputs.features.shape[1], maps, pooled=False)


def test_guide(pair: NetworkPair):
    net = GuideNet(7, C).double()
    inputs = np.concatenate([numpy(pair.guidance.features), numpy(pair.guidance.logits)], 1)
    hidden = through(inputs, net.body)
    logit = hidden @ numpy(net.head.weight)[0] + numpy(net.head.bias)[0]
    close(net(pair.guidance.features, pair.guidance.logits), 1 / (1 + np.exp(-logit)))
    assert [p.shape[0] for p in net.parameters() if p.ndim == 2] == [64, 128, 1]


def test_the_deployed_model_is_the_teachers_head_on_the_students_features(images: Problem):
    learner, (student_sizes, teacher_sizes) = make_learner(
        simkd(), images.student().double(), images.teacher, (1, 8, 8), SGDConfig(batch_size=16), 0, torch.float64
    )
    assert student_sizes.pooled
    assert teacher_sizes.pooled
    x = images.data.test.x[:]
    learner.eval()
    outputs = learner.forward_student(x)
    expected = images.teacher.head(learner.of(0)(outputs.maps[-1]).mean((2, 3)))  # type: ignore[operator, misc]
    torch.testing.assert_close(learner(x), expected)


@pytest.mark.parametrize("method", [kd(), disk(), fitnet(), semckd(), simkd()])
def test_the_loss_of_a_method_is_the_sum_of_its_terms(images: Problem, method):
    learner, _ = make_learner(
        method, images.student().double(), images.teacher, (1, 8, 8), SGDConfig(batch_size=16), 0, torch.float64
    )
    x, y = images.data.train.x[:16], images.data.train.y[:16]
    with torch.no_grad():
        pair = NetworkPair(learner.forward_student(x), FeatureTap(images.teacher.eval(), maps=True)(x), y)
        losses = [term.loss(pair, learner.of(n)) for n, term in enumerate(method.terms)]
        torch.testing.assert_close(learner.losses(pair), sum(losses))
