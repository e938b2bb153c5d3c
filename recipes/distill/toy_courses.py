"""Students of a toy problem trained from many starts at once (Acar, thesis 2023, §6.1 and A.1.5).

``train`` runs cross entropy, distillation and DiSK (algorithm 7) for all starts in one ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.parts.objectives.guidance import budget, guided, multiplier

Student = Callable[[Tensor, Tensor], Tensor]  # (parameters [P], inputs [N, d]) -> logits [N, C]


@dataclass(frozen=True)
class Toy:
    """A problem with its student and the teacher's outputs.

    Attributes:
        name: its name.
        train: the training samples.
        test: other samples.
        student: (parameters [P], inputs [N, d]) -> logits [N, C].
        start: parameters [S, P] drawn by a generator.
        keep: projects parameters [P] onto the admissible set after a step.
        teacher_logits: [N, C] on the training samples.
        teacher_features: [N, F] on the training samples, from which the guide chooses.
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
    teacher_features: Tensor
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

    >>> logits, y, g = torch.zeros(1, 2), torch.tensor([0]), torch.zeros(1)
    >>> lagrangian(logits, logits, y, g, alpha=0.5, tau=1.0, tau_s=1.0, top_k=1)  # log 2 of either
    tensor(0.6931)
    >>> lagrangian(logits, logits, y, g + 0.5, alpha=0.0, tau=1.0, tau_s=1.0, top_k=1, multiplier=2.0)  # 2·½ log 2
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
        lr: learning rate of the student.
        guide_lr: learning rate of the guide.
        momentum: momentum of both.
        weight_decay: weight decay of the student.
        guide_decay: weight decay of the guide.
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
    """Where all starts ended, and their paths.

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
    """Train all starts at once; courses with the same seed have the same starts.

    >>> from toy_problems import intervals
    >>> toy = intervals(samples=60)
    >>> runs = train(toy, Course(rounds=2), starts=3)
    >>> tuple(runs.parameters.shape), tuple(runs.path.shape)
    ((3, 2), (3, 3, 2))
    """
    p = toy.start(rng.stream(seed, f"start {toy.name}"), starts).to(toy.train.x)
    z = torch.cat([toy.teacher_features, torch.ones(len(toy.teacher_features), 1)], 1)  # [N, F + 1]
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
    """The number of students at each minimum, and at none.

    >>> from toy_problems import intervals
    >>> toy = intervals(samples=60)
    >>> counts(toy, torch.tensor([[2.0, 3.0], [5.1, 7.0], [8.0, 8.5]]))
    {'A': 1, 'B': 0, 'C': 1, 'none': 1}
    """
    numbers = torch.bincount(toy.which(parameters), minlength=len(toy.minima) + 1).tolist()
    return dict(zip((*toy.minima, "none"), numbers, strict=True))


ALPHAS, TEMPERATURES = (0.0, 0.1, 0.5, 0.9), (1.0, 2.0, 4.0)  # what the thesis scans for KD and DiSK, but α = 1
GRID: dict[str, tuple[float, ...]] = {  # what it scans for DiSK
    "alpha": (*ALPHAS, 1.0),
    "tau": TEMPERATURES,
    "tau_s": TEMPERATURES,
    "top_k": (1, 2, 3),
    "delta": (0.1, 0.05, 0.0),
    "lam_min": (0.01, 0.1, 1.0, 5.0, 10.0),
    "lam_max": (1.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0),
    "lam_period": (20, 50),
}


def scan(count: int) -> list[Course]:
    """Courses of DiSK drawn without replacement from the thesis' whole grid, where λ_min ≤ λ_max.

    >>> len(set(scan(20))), max(course.lam_min - course.lam_max for course in scan(20)) <= 0
    (20, True)
    """
    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    grid = [point for point in grid if point["lam_min"] <= point["lam_max"]]
    numbers = rng.stream(0, "scan").choice(len(grid), count, replace=False)
    return [Course(guide=True, **grid[number]) for number in numbers]  # type: ignore[arg-type]


def candidates(count: int) -> dict[str, list[Course]]:
    """The candidate courses of each method: α and τ from the scanned ranges, otherwise the text's defaults.

    The text's default K 2 helps both classes of the line alike; ``DiSK, K 1`` is the other value that it scans there,
    and ``DiSK, whole grid`` has ``count`` courses drawn from everything that it scans. ``DiSK, strong guide`` is far
    from them: λ 3 throughout, and the guide's rate 3.
    """
    plain = [Course(alpha=alpha, tau=tau) for alpha, tau in product(ALPHAS, TEMPERATURES)]
    guided = [replace(course, guide=True) for course in plain]
    single = [replace(course, top_k=1) for course in guided]
    return {
        "cross entropy": [Course()], "KD": plain, "DiSK": guided, "DiSK, K 1": single,
        "DiSK, whole grid": scan(count), "DiSK, strong guide": [STRONG],
    }  # fmt: skip


STRONG = Course(alpha=0.1, tau=6.0, guide=True, top_k=1, lam_min=3.0, lam_max=3.0, guide_lr=3.0)


def shorter(course: Course, rounds: int) -> Course:
    """The same course with fewer rounds and proportionally shorter periods."""
    return replace(course, rounds=rounds, lam_period=max(1, course.lam_period * rounds // course.rounds))
