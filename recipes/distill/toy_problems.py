"""Two toy problems full of bad minima, and students trained on them from many starts at once.

Acar, thesis 2023, §6.1 and A.1.5: points on a line that a teacher with two intervals knows and a student with one does
not, and six Gaussian balls in the plane for a student with two hidden neurons. ``train`` runs cross entropy,
distillation and DiSK (algorithm 7) for all starts in one ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedloom.core import rng
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.data.sources import sources
from fedloom.parts.objectives.guidance import budget, guided, multiplier

KAPPA, SCALE = 2.5, 15.0  # κ and c of the problem on the line
Student = Callable[[Tensor, Tensor], Tensor]  # (parameters [P], inputs [N, d]) -> logits [N, C]


@dataclass(frozen=True)
class Toy:
    """A problem with its student, and what the teacher says of it.

    Attributes:
        name: what it is called.
        train: the samples from which everybody learns.
        test: other samples.
        student: (parameters [P], inputs [N, d]) -> logits [N, C].
        start: parameters [S, P] drawn by a generator.
        keep: what makes parameters [P] admissible again after a step.
        teacher_logits: [N, C] on the training samples.
        seen: the teacher's features of them [N, F], from which the guide chooses.
        test_teacher: the teacher's accuracy on the test samples.
        minima: names of the minima, the global one last.
        which: number of the minimum at which parameters [S, P] are, [S]; one more than the last if at none.
    """

    name: str
    train: Arrays
    test: Arrays
    student: Student
    start: Callable[[np.random.Generator, int], Tensor]
    keep: Callable[[Tensor], Tensor]
    teacher_logits: Tensor
    seen: Tensor
    test_teacher: float
    minima: tuple[str, ...]
    which: Callable[[Tensor], Tensor]

    def accuracy(self, parameters: Tensor) -> Tensor:
        """On the test samples, [S]."""
        x, y = self.test.x, self.test.y
        return vmap(lambda p: (self.student(p, x).argmax(-1) == y).float().mean())(parameters)


def lagrangian(
    student_logits: Tensor,
    teacher_logits: Tensor,
    y: Tensor,
    g: Tensor,
    *,
    alpha: float,
    tau: float,
    tau_s: float,
    top_k: int,
    delta: float = 0.0,
    multiplier: float | Tensor = 0.0,
) -> Tensor:
    """α L_CE(s) + (1 - α) L_dist(s, g) + λ L_budget(s, g), eq. (6.5), one number [].

    Without ``multiplier`` it is what the student descends, with it what the guide does; who descends it detaches the
    other: ``student_logits.detach()`` for the guide's pass, ``g.detach()`` for the student's.

    Args:
        student_logits: [N, C].
        teacher_logits: [N, C].
        y: classes [N].
        g: the guide [N], in [0, 1].
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's.
        top_k: K.
        delta: δ ≥ 0.
        multiplier: λ ≥ 0.

    >>> said, y, g = torch.zeros(1, 2), torch.tensor([0]), torch.zeros(1)
    >>> lagrangian(said, said, y, g, alpha=0.5, tau=1.0, tau_s=1.0, top_k=1)  # log 2 of either
    tensor(0.6931)
    >>> lagrangian(said, said, y, g + 0.5, alpha=0.0, tau=1.0, tau_s=1.0, top_k=1, multiplier=2.0)  # half; 2·½ log 2
    tensor(1.0397)
    """
    parts = []  # what weighs nothing is not computed
    if alpha > 0:
        parts.append(alpha * F.cross_entropy(student_logits, y))
    if alpha < 1:
        parts.append((1 - alpha) * guided(student_logits, teacher_logits, g, tau, tau_s, top_k).mean())
    if isinstance(multiplier, Tensor) or multiplier:
        parts.append(multiplier * budget(student_logits, y, g, delta))
    return torch.stack(parts).sum()


@dataclass(frozen=True)
class Course:
    """How a student is trained: α L_CE + (1 - α) L_dist at full batch, without a guide or in turns with one.

    SGD with momentum and weight decay for ``rounds`` times ``passes`` steps. With ``guide`` each round first moves the
    guide g = σ(⟨a, z⟩ + b), z the teacher's features, on the whole Lagrangian with λ_r from the schedule.

    Args:
        alpha: α in [0, 1]; 1 is cross entropy.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's; None takes τ.
        guide: whether there is one.
        top_k: K.
        delta: δ ≥ 0.
        lam_min: λ_min.
        lam_max: λ_max.
        lam_period: λ_T, in rounds.
        rounds: R.
        passes: the student's steps a round.
        guide_passes: the guide's.
        lr: of the student.
        guide_lr: of the guide.
        momentum: of both.
        weight_decay: of the student.
        guide_decay: of the guide.
    """

    alpha: float = 1.0
    tau: float = 1.0
    tau_s: float | None = None
    guide: bool = False
    top_k: int = 2
    delta: float = 0.0
    lam_min: float = 0.1
    lam_max: float = 50.0
    lam_period: int = 50
    rounds: int = 200
    passes: int = 3
    guide_passes: int = 3
    lr: float = 0.1
    guide_lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.01
    guide_decay: float = 0.01

    def __post_init__(self) -> None:
        multiplier(0, self.rounds, self.lam_min, self.lam_max, self.lam_period)
        if not (0 <= self.alpha <= 1 and self.tau > 0 and (self.tau_s or 1.0) > 0 and self.delta >= 0):
            raise ConfigError("a course needs alpha in [0, 1], positive temperatures and delta of at least 0.")
        if not (self.passes >= 1 and self.guide_passes >= 1 and self.lr > 0 and self.guide_lr > 0):
            raise ConfigError("a course needs at least 1 pass and positive learning rates.")

    def objective(self, toy: Toy, logits: Tensor, g: Tensor, lam: float | Tensor = 0.0) -> Tensor:
        """The Lagrangian on the training samples, []."""
        return lagrangian(
            logits, toy.teacher_logits, toy.train.y, g, alpha=self.alpha, tau=self.tau, tau_s=self.tau_s or self.tau,
            top_k=self.top_k, delta=self.delta, multiplier=lam,
        )  # fmt: skip


@dataclass
class ToyRuns:
    """Where all starts ended, and how they came there.

    Attributes:
        parameters: [S, P].
        guides: the guide on the training samples, [S, N]; all 0 without one.
        path: parameters after every round, [R + 1, S, P], the start first.
        help: the mean guide on every sample after every round, [R, N].
        multipliers: λ_r, [R].
    """

    parameters: Tensor
    guides: Tensor
    path: Tensor
    help: Tensor
    multipliers: list[float] = field(default_factory=list)


def train(toy: Toy, course: Course, starts: int = 100, seed: int = 0) -> ToyRuns:
    """All starts at once; equal starts for every course of the same seed.

    >>> toy = intervals(samples=60)
    >>> found = train(toy, Course(rounds=2), starts=3)
    >>> tuple(found.parameters.shape), tuple(found.path.shape)
    ((3, 2), (3, 3, 2))
    """
    p = toy.start(rng.stream(seed, f"start {toy.name}"), starts).to(toy.train.x)
    z = torch.cat([toy.seen, torch.ones(len(toy.seen), 1)], 1)  # [N, F + 1]
    q = torch.from_numpy(rng.stream(seed, f"guide {toy.name}").normal(size=(starts, z.shape[1]))).to(z) / 2

    def help(q: Tensor) -> Tensor:
        return torch.sigmoid(z @ q) if course.guide else z.new_zeros(len(z))

    def at_guide(q: Tensor, logits: Tensor, lam: Tensor) -> Tensor:
        return course.objective(toy, logits, help(q), lam)

    def at_student(p: Tensor, g: Tensor) -> Tensor:
        return course.objective(toy, toy.student(p, toy.train.x), g)

    student = vmap(lambda p: toy.student(p, toy.train.x))
    slope_q, slope_p = vmap(grad(at_guide), in_dims=(0, 0, None)), vmap(grad(at_student))
    keep, helps = vmap(toy.keep), vmap(help)
    mp, mq = torch.zeros_like(p), torch.zeros_like(q)
    path, means, multipliers = [p], [], []
    for r in range(course.rounds):
        multipliers.append(multiplier(r, course.rounds, course.lam_min, course.lam_max, course.lam_period))
        if course.guide:
            logits, lam = student(p), torch.tensor(multipliers[-1])
            for _ in range(course.guide_passes):
                mq = course.momentum * mq + slope_q(q, logits, lam) + course.guide_decay * q
                q = q - course.guide_lr * mq
        g = helps(q)
        for _ in range(course.passes):
            mp = course.momentum * mp + slope_p(p, g) + course.weight_decay * p
            p = keep(p - course.lr * mp)
        path.append(p)
        means.append(g.mean(0))
    return ToyRuns(p, helps(q), torch.stack(path), torch.stack(means), multipliers)


def counts(toy: Toy, parameters: Tensor) -> dict[str, int]:
    """How many students are at each minimum, and how many at none.

    >>> toy = intervals(samples=60)
    >>> counts(toy, torch.tensor([[2.0, 3.0], [5.1, 7.0], [8.0, 8.5]]))
    {'A': 1, 'B': 0, 'C': 1, 'none': 1}
    """
    found = torch.bincount(toy.which(parameters), minlength=len(toy.minima) + 1).tolist()
    return dict(zip((*toy.minima, "none"), found, strict=True))


ALPHAS, TEMPERATURES = (0.0, 0.1, 0.5, 0.9), (1.0, 2.0, 4.0)  # what the thesis scans for KD and DiSK, but α = 1


def candidates() -> dict[str, list[Course]]:
    """The courses of each method from which one is chosen: α and τ of the scanned ranges, else the text's defaults.

    The text's default K 2 helps both classes of the line alike; ``DiSK, K 1`` is the other value that it scans there.
    ``DiSK, strong guide`` is far from them: λ 3 throughout, and the guide's rate 3.
    """
    plain = [Course(alpha=alpha, tau=tau) for alpha, tau in product(ALPHAS, TEMPERATURES)]
    guided = [replace(course, guide=True) for course in plain]
    single = [replace(course, top_k=1) for course in guided]
    strong = Course(alpha=0.1, tau=6.0, guide=True, top_k=1, lam_min=3.0, lam_max=3.0, guide_lr=3.0)
    return {
        "cross entropy": [Course()], "KD": plain, "DiSK": guided, "DiSK, K 1": single, "DiSK, strong guide": [strong]
    }  # fmt: skip


# --- one dimension ---

MINIMA = {"A": (2.0, 3.0), "B": (2.0, 7.0), "C": (5.0, 7.0)}  # intervals that a student ends with


def inside(x: Tensor, a: Tensor, b: Tensor, kappa: float) -> Tensor:
    """h(x; a, b) = σ(κ(x - a)) - σ(κ(x - b)), about 1 between a and b.

    >>> inside(torch.tensor([0.0, 2.5, 5.0]), torch.tensor(2.0), torch.tensor(3.0), 10.0).round(decimals=3)
    tensor([0.0000, 0.9870, 0.0000])
    """
    return torch.sigmoid(kappa * (x - a)) - torch.sigmoid(kappa * (x - b))


def intervals(
    kappa: float = KAPPA, scale: float = SCALE, seed: int = 0, samples: int = 1000, within: float = 9.0
) -> Toy:
    """Points on [0, 9]: a teacher of two intervals, f = h(·; a, b) + h(·; c, d), a student of one, h(·; a, b).

    The thesis gives h and f and calls their scale κ, without its value, and not how they become scores. Here logits are
    c(1 - h, h): as probabilities they would have a logarithm that grows without bound in the distance of a wrong point,
    and then cross entropy has one minimum alone, not the three of table 6.1.

    Args:
        kappa: κ > 0, how sharp an interval's ends are.
        scale: c > 0, how large scores are.
        seed: of the data and of the teacher's starts.
        samples: training points.
        within: students start in [0, within]; below 9, on the left. By geometry the minima B and C are equally good,
            and which one a student comes to depends on where it starts.
    """
    source = sources.make("intervals", seed=seed, samples=samples)

    def scores(h: Tensor) -> Tensor:
        return scale * torch.stack([1 - h, h], -1)

    def student(p: Tensor, x: Tensor) -> Tensor:
        return scores(inside(x[:, 0], p[0], p[1], kappa))

    def features(p: Tensor, x: Tensor) -> Tensor:
        return torch.stack([inside(x[:, 0], p[i], p[i + 1], kappa) for i in (0, 2)], -1)

    def teacher(p: Tensor, x: Tensor) -> Tensor:
        return scores(features(p, x).sum(-1))

    best = _taught(source.train, teacher, _ordered, _sorted(4)(rng.stream(seed, "teacher intervals"), 32))

    def which(p: Tensor) -> Tensor:
        ends = p.new_tensor(list(MINIMA.values()))
        far = (p[:, None] - ends).abs().amax(-1)  # [S, minima]
        near, number = far.min(1)
        return torch.where(near < 0.8, number, len(MINIMA))

    said = teacher(best, source.test.x).argmax(-1) == source.test.y
    return Toy(
        "intervals", source.train, source.test, student, _sorted(2, within), _ordered, teacher(best, source.train.x),
        features(best, source.train.x), said.float().mean().item(), tuple(MINIMA), which,
    )  # fmt: skip


def _sorted(count: int, within: float = 9.0) -> Callable[[np.random.Generator, int], Tensor]:
    """Numbers [S, count] uniform on [0, within], in ascending order."""
    return lambda draw, starts: torch.from_numpy(np.sort(draw.uniform(0, within, (starts, count)), 1)).float()


def _ordered(p: Tensor) -> Tensor:
    """0 ≤ a ≤ b ≤ ... ≤ 9."""
    return torch.cummax(p.clamp(0, 9), 0).values


def _taught(train: Arrays, model: Student, keep: Callable[[Tensor], Tensor], p: Tensor, steps: int = 600) -> Tensor:
    """The best by training loss of several starts [S, P] under cross entropy; lr .1, momentum .9, weight decay .01."""

    def loss(p: Tensor) -> Tensor:
        return F.cross_entropy(model(p, train.x), train.y)

    slope, velocity = vmap(grad(loss)), torch.zeros_like(p)
    for _ in range(steps):
        velocity = 0.9 * velocity + slope(p) + 0.01 * p
        p = vmap(keep)(p - 0.1 * velocity)
    return p[vmap(loss)(p).argmin()]


# --- two dimensions ---

LEVELS = {"A": 0.7, "B": 0.8, "C": 0.9, "D": 1.0}  # accuracies at the minima of table 6.1
WIDTHS = {"student": (2, 2, 3), "teacher": (2, 8, 16, 3)}


def gaussians(seed: int = 0, samples: int = 1000, test_samples: int = 1000) -> Toy:
    """Six balls in the plane: a teacher of 8, 16 and 3 neurons, a student of 2 and 3; batch norm and ReLU between.

    Norms take their statistics from all training samples, the batch. The last layer has a bias, although A.1.5
    writes h(x) = W₂ φ(W₁ x): without one the largest logit depends on the direction of two features that are not
    negative alone, so that classes are cones, and no student could tell red from the two others at both of its balls.
    A student is at the minimum of table 6.1 whose accuracy is nearest to its own on the test samples.

    Args:
        seed: of the data and of the teacher's starts.
        samples: training points.
        test_samples: test points.
    """
    source = sources.make("six_gaussians", seed=seed, samples=samples, test_samples=test_samples)
    x = source.train.x

    def student(p: Tensor, at: Tensor) -> Tensor:
        return _perceptron(p, WIDTHS["student"], x, at)[0]

    def teacher(p: Tensor, at: Tensor) -> Tensor:
        return _perceptron(p, WIDTHS["teacher"], x, at)[0]

    first = _neurons("teacher")(rng.stream(seed, "teacher six gaussians"), 4)
    best = _taught(source.train, teacher, lambda p: p, first, steps=200)
    logits, hidden = _perceptron(best, WIDTHS["teacher"], x, x)
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-6)
    said = teacher(best, source.test.x).argmax(-1) == source.test.y

    def which(p: Tensor) -> Tensor:
        return (_accuracy(student, p, source.test)[:, None] - p.new_tensor(list(LEVELS.values()))).abs().argmin(1)

    return Toy(
        "six gaussians", source.train, source.test, student, _neurons("student"), lambda p: p, logits, hidden,
        said.float().mean().item(), tuple(LEVELS), which,
    )  # fmt: skip


def _accuracy(student: Student, parameters: Tensor, test: Arrays) -> Tensor:
    return vmap(lambda p: (student(p, test.x).argmax(-1) == test.y).float().mean())(parameters)


def _neurons(who: str) -> Callable[[np.random.Generator, int], Tensor]:
    """Parameters [S, P] end to end: each layer's weights, then its norm's 1 and 0, of the last one its bias.

    Weights and bias are uniform within ±1/√inputs.
    """

    def draw(draws: np.random.Generator, starts: int) -> Tensor:
        widths, pieces = WIDTHS[who], []
        for number, (d, h) in enumerate(pairwise(widths)):
            pieces.append(draws.uniform(-(d**-0.5), d**-0.5, (starts, h * d)))
            if number < len(widths) - 2:
                pieces += [np.ones((starts, h)), np.zeros((starts, h))]
            else:
                pieces.append(draws.uniform(-(d**-0.5), d**-0.5, (starts, h)))
        return torch.from_numpy(np.concatenate(pieces, 1)).float()

    return draw


def _perceptron(p: Tensor, widths: tuple[int, ...], batch: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and last features on ``at`` [M, d]; norms take their statistics from ``batch`` [N, d]."""
    same, start = at is batch, 0
    batch, at = batch.T, at.T  # [d, N], [d, M]: samples lie side by side, so that few neurons are no short rows
    for number, (d, h) in enumerate(pairwise(widths)):
        w = p[start : start + h * d].reshape(h, d)
        start += h * d
        if number == len(widths) - 2:
            return (w @ at + p[start : start + h, None]).T, at.T
        gain, shift = p[start : start + h, None], p[start + h : start + 2 * h, None]
        start += 2 * h
        before = w @ batch
        mean, scale = before.mean(1, keepdim=True), gain / (before.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        batch = ((before - mean) * scale + shift).relu()
        at = batch if same else ((w @ at - mean) * scale + shift).relu()
    raise AssertionError("a perceptron has at least one layer")


def shorter(course: Course, rounds: int) -> Course:
    """The same course for fewer rounds, its periods in proportion."""
    return replace(course, rounds=rounds, lam_period=max(1, course.lam_period * rounds // course.rounds))
