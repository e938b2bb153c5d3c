"""The passes: a student's over the data, and a guide's over what the student contributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.errors import FedLoomError
from fedloom.core.federation import Arrays
from fedloom.data.augment import Pipeline
from fedloom.parts.objectives.divergence import cross_entropy
from fedloom.parts.objectives.guidance import budget
from fedloom.tasks.distill.guide import GuideNet, fit_temperature
from fedloom.tasks.distill.learner import StudentModule, selective
from fedloom.tasks.distill.method import Distiller, NetworkPair
from fedloom.tasks.distill.taps import Outputs
from fedloom.tasks.distill.teacher_cache import TeacherCache
from fedloom.tasks.distill.training import SGDConfig

AT_ONCE = 1000  # samples of a forward pass


class Diverged(FedLoomError, RuntimeError):
    """A loss that is no longer a number."""


@dataclass
class DistillationData:
    """What stays the same in all passes of a run.

    Attributes:
        train: the samples.
        teacher: the teacher's words on them; None without a teacher.
        change: augmentation, if there is any.
        training: the optimiser's settings.
        seed: of the run.
    """

    train: Arrays
    teacher: TeacherCache | None
    change: Pipeline | None
    training: SGDConfig
    seed: int

    def batches(self, purpose: str, *counters: int) -> list[Tensor]:
        """The rows of each mini-batch of a pass."""
        rows = self.training.batches(len(self.train), self.seed, purpose, *counters)
        return [part.to(self.train.x.device) for part in rows]

    def at(self, rows: Tensor, draw: np.random.Generator) -> tuple[Tensor, Outputs | None, Tensor]:
        """A mini-batch: inputs, perhaps changed, what the teacher says of them, and labels."""
        x, y = self.train.x[rows], self.train.y[rows]
        if self.change is None:
            return x, None if self.teacher is None else self.teacher.at(rows), y
        x = self.change(x, [(draw, len(rows))])
        return x, None if self.teacher is None else self.teacher.of(x), y


def optimiser(parameters: list[nn.Parameter], training: SGDConfig) -> torch.optim.SGD:
    """SGD with the run's settings; the learning rate is set before every step."""
    return torch.optim.SGD(
        parameters, training.lr, training.momentum, 0.0, training.weight_decay, nesterov=training.nesterov
    )


def momentum(sgd: torch.optim.SGD) -> dict[str, Tensor]:
    """The momentum buffers, by the parameter's number."""
    state = sgd.state_dict()["state"]
    return {str(n): s["momentum_buffer"] for n, s in state.items() if s.get("momentum_buffer") is not None}


def put_momentum(sgd: torch.optim.SGD, buffers: dict[str, Tensor]) -> None:
    """Put them back."""
    whole = sgd.state_dict()
    whole["state"] = {int(n): {"momentum_buffer": value} for n, value in buffers.items()}
    sgd.load_state_dict(whole)


def step(sgd: torch.optim.SGD, loss: Tensor, lr: float, clip: float | None, who: str) -> float:
    """One step down a mean loss; returns it.

    Raises:
        Diverged: if it is not a number.
    """
    value = float(loss.detach())
    if not np.isfinite(value):
        raise Diverged(f"{who}'s loss is {value}; take a smaller learning rate, or clip gradients (training.clip=10).")
    for group in sgd.param_groups:
        group["lr"] = lr
    sgd.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in sgd.param_groups for p in group["params"]], clip)
    sgd.step()
    return value


Losses = Callable[[Tensor, Outputs | None, Tensor], Tensor]
"""Inputs, the teacher's words and labels to the student's losses [B]."""


def student_pass(
    bench: DistillationData,
    learner: StudentModule,
    sgd: torch.optim.SGD,
    number: int,
    rate: Callable[[int], float],
    losses: Losses,
) -> float:
    """One pass of the student over the data; returns the mean loss.

    Args:
        bench: what stays the same.
        learner: the student with its layers.
        sgd: of the parameters that are to change.
        number: of the pass, from 0, counted over the whole run: it decides the mini-batches.
        rate: the learning rate of the so-manieth step of this pass.
        losses: what the student descends.
    """
    learner.train()
    if learner.head is not None:
        learner.head.eval()
    total = 0.0
    batches = bench.batches("batches", number)
    for at, rows in enumerate(batches):
        x, teacher, y = bench.at(rows, rng.stream(bench.seed, "augment", number, at))
        rng.seed_torch(bench.seed, "dropout", number, at)
        loss = losses(x, teacher, y).mean()
        total += step(sgd, loss, rate(at), bench.training.clip, "the student") * len(rows)
    return total / sum(map(len, batches))


def on_labels(learner: StudentModule) -> Losses:
    """Cross entropy of the student's own head: the warm start, the same bits as method ``ce``."""
    return lambda x, teacher, y: cross_entropy(learner.forward_student(x).logits, y)


def on_terms(learner: StudentModule, guide: GuideNet | None = None, tau_s: float = 1.0) -> Losses:
    """The method's terms, with the guide held still."""

    def losses(x: Tensor, teacher: Outputs | None, y: Tensor) -> Tensor:
        g = None
        if guide is not None and teacher is not None:
            with torch.no_grad():
                g = guide.eval()(teacher.features, teacher.logits)
        return learner.losses(NetworkPair(learner.forward_student(x), teacher, y), g, tau_s)

    return losses


@dataclass
class StudentSnapshot:
    """What a guide learns from in one round: the student's contributions, which stand still meanwhile.

    Attributes:
        views: one a selective term, [N, ...].
        own: the student's own logits [N, C].
        answers: those of the deployed model [N, C].
        teacher: the teacher's words, without maps.
        y: labels [N].
    """

    views: list[Tensor]
    own: Tensor
    answers: Tensor
    teacher: Outputs
    y: Tensor

    @property
    def wrong(self) -> Tensor:
        """Where the deployed model errs, bool [N]."""
        return self.answers.argmax(1) != self.y


def snapshot_student(bench: DistillationData, learner: StudentModule, method: Distiller, round: int) -> StudentSnapshot:
    """One forward pass over the data: where the student stands. With augmentation, on one view of every sample.

    ``round`` is counted from the end of the warm start, and decides that view.
    """
    learner.eval()
    found: list[tuple[list[Tensor], Tensor, Tensor, Outputs]] = []
    everything = torch.arange(len(bench.train), device=bench.train.x.device)
    with torch.no_grad():
        for at, rows in enumerate(everything.split(AT_ONCE)):
            x, teacher, y = bench.at(rows, rng.stream(bench.seed, "augment-guide", round, at))
            assert teacher is not None
            said = learner.forward_student(x)
            pair = NetworkPair(said, teacher, y)
            views = [term.view(pair, learner.of(n)) for n, term in selective(method)]
            found.append((views, said.logits, learner.deployed_logits(said), Outputs(teacher.logits, teacher.features)))
    views, own, answers, said = zip(*found, strict=True)
    teacher = Outputs(torch.cat([s.logits for s in said]), torch.cat([s.features for s in said]))
    together = [torch.cat(parts) for parts in zip(*views, strict=True)]
    return StudentSnapshot(together, torch.cat(own), torch.cat(answers), teacher, bench.train.y)


def fitted(method: Distiller, now: StudentSnapshot) -> float | None:
    """τ_s, if some term asks for one."""
    for _, term in selective(method):
        if term.fits is not None:
            return fit_temperature(now.teacher.logits, now.own, term.fits)
    return None


def guide_pass(
    bench: DistillationData,
    method: Distiller,
    now: StudentSnapshot,
    net: GuideNet,
    sgd: torch.optim.SGD,
    batches: list[Tensor],
    lr: float,
    lagrange: float,
    delta: float,
    tau_s: float,
) -> float:
    """One pass of the guide over the data, with the student held still; returns the mean of its Lagrangian.

    Σ of the selective terms + λ [-(1/#wrong) Σ g log s_y - δ]_+ on every mini-batch, s the deployed model.
    """
    net.train()
    total = 0.0
    for rows in batches:
        teacher = Outputs(now.teacher.logits[rows], now.teacher.features[rows])
        y = now.y[rows]
        g = net(teacher.features, teacher.logits)
        loss = lagrange * budget(now.answers[rows], y, g, delta)
        for (_, term), view in zip(selective(method), now.views, strict=True):
            loss = loss + term.weight * term.guided(view[rows], teacher, y, g, tau_s).mean()
        total += step(sgd, loss, lr, bench.training.clip, "the guide") * len(rows)
    return total / sum(map(len, batches))


def guide_values(net: GuideNet, now: StudentSnapshot) -> Tensor:
    """g on every training sample, [N]."""
    net.eval()
    with torch.no_grad():
        parts = zip(now.teacher.features.split(AT_ONCE), now.teacher.logits.split(AT_ONCE), strict=True)
        return torch.cat([net(f, t) for f, t in parts])


def spent(now: StudentSnapshot, g: Tensor) -> float:
    """-(1/#wrong) Σ g log s_y over the whole training set: what stands beside δ."""
    return float(budget(now.answers, now.y, g, 0.0))


def measured(model: nn.Module, arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Accuracy and mean cross entropy of a model; nothing for no samples."""
    if not len(arrays):
        return
    model.eval()
    right, loss = 0, 0.0
    with torch.inference_mode():
        for x, y in zip(arrays.x.split(AT_ONCE), arrays.y.split(AT_ONCE), strict=True):
            logits = model(x)
            right += int((logits.argmax(1) == y).sum())
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    yield "accuracy", right / len(arrays)
    yield "loss", loss / len(arrays)
