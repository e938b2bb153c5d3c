"""The trained modules: the student with the layers of its terms, the guide, and the deployed model.

Training passes: the student's over the data, and the guide's over the student's contributions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ClientError, ConfigError, in_one_line
from fedloom.data.augment import Pipeline
from fedloom.parts.objectives.divergence import cross_entropy
from fedloom.parts.objectives.guidance import budget
from fedloom_apps.distill.data import Subset, TeacherCache
from fedloom_apps.distill.experiment import SGDConfig
from fedloom_apps.distill.method import Distiller, FeatureTap, GuideNet, NetworkPair, Outputs, Sizes


class StudentModule(nn.Module):
    """The student, the layers of its terms, and the teacher's head if it is deployed."""

    def __init__(
        self,
        method: Distiller,
        student: nn.Module,
        sizes: tuple[Sizes, Sizes],
        head: nn.Module | None,
        training: SGDConfig,
    ) -> None:
        super().__init__()
        self.terms, self.reuse = method.terms, method.reuse
        self.student = student
        self.operands = training.operand_dtype
        modules = [term.layers(*sizes, training.batch_size) for term in method.terms]
        self.layers = nn.ModuleDict(
            {str(number): module for number, module in enumerate(modules) if module is not None}
        )
        self.head: nn.Module | None = None
        if self.reuse is not None:
            assert head is not None
            self.head = copy.deepcopy(head).requires_grad_(False)
        self.taps = FeatureTap(student, maps=method.maps)

    def of(self, number: int) -> nn.Module | None:
        """The layers of the term with this number; None if it has none."""
        return dict(self.layers.items()).get(str(number))

    def forward_student(self, x: Tensor) -> Outputs:
        """The student's outputs on inputs [B, ...]."""
        return self.taps(x, self.operands if self.training else None)

    def deployed_logits(self, outputs: Outputs) -> Tensor:
        """The deployed model's logits [B, C], from the student's outputs: its own, or those of the teacher's head."""
        if self.reuse is None:
            return outputs.logits
        assert self.head is not None
        return self.head(self.terms[self.reuse].features(outputs, self.of(self.reuse)))

    def forward(self, x: Tensor) -> Tensor:
        """The deployed model: logits [B, C]."""
        return self.deployed_logits(self.forward_student(x))

    def losses(self, pair: NetworkPair, g: Tensor | None = None, tau_s: float = 1.0) -> Tensor:
        """The student's loss of each sample, [B], given the guide [B]."""
        return torch.stack([t.loss(pair, self.of(n), g, tau_s) for n, t in enumerate(self.terms)]).sum(0)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the student and its terms' layers."""
        return [p for p in (*self.student.parameters(), *self.layers.parameters()) if p.requires_grad]

    def parts(self) -> dict[str, nn.Module]:
        """The modules of the deployed model by prefix; only the student unless the teacher's head is reused."""
        if self.reuse is None:
            return {"": self.student}
        modules = {"student.": self.student, "layers.": self.of(self.reuse), "head.": self.head}
        return {prefix: module for prefix, module in modules.items() if module is not None}

    def deployed_state(self) -> dict[str, Tensor]:
        """A copy of the deployed model's tensors by name."""
        return {
            f"{prefix}{name}": value.detach().clone()
            for prefix, module in self.parts().items()
            for name, value in module.state_dict().items()
        }

    def deploy(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors returned by ``deployed_state``."""
        for prefix, module in self.parts().items():
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            module.load_state_dict(state)

    def size(self) -> int:
        """The number of parameters of the deployed model."""
        total = sum(p.numel() for module in self.parts().values() for p in module.parameters())
        unused_parameters = 0 if self.reuse is None else sum(p.numel() for p in self.taps.model.head.parameters())
        return total - unused_parameters


def make_learner(
    method: Distiller,
    student: nn.Module,
    teacher: nn.Module | None,
    inputs: tuple[int, ...],
    training: SGDConfig,
    seed: int,
    dtype: torch.dtype,
) -> tuple[StudentModule, tuple[Sizes, Sizes]]:
    """Make the student module of a method; also returns the output sizes of student and teacher."""
    try:
        student_sizes = FeatureTap(student).sizes(inputs, dtype)
        teacher_sizes = student_sizes if teacher is None else FeatureTap(teacher).sizes(inputs, dtype)
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"student or teacher does not accept inputs of shape {inputs}: {in_one_line(error)}."
        raise ConfigError(message) from error
    if student_sizes.classes != teacher_sizes.classes:
        raise ConfigError(f"the student has {student_sizes.classes} outputs, but the teacher {teacher_sizes.classes}.")
    head: Any = None if teacher is None else teacher.head
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "layers")
        learner = StudentModule(method, student, (student_sizes, teacher_sizes), head, training).to(dtype)
    return learner, (student_sizes, teacher_sizes)


def make_guide(method: Distiller, teacher: Sizes, seed: int, dtype: torch.dtype) -> GuideNet | None:
    """Make the guide's network, if the method has a guide."""
    if method.guide is None:
        return None
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "guide")
        return GuideNet(teacher.features, teacher.classes, method.guide.hidden).to(dtype)


AT_ONCE = 1000  # samples of a forward pass


class Diverged(ClientError):
    """A loss that is infinite or NaN."""


@dataclass
class DistillationData:
    """The data and settings that all passes of a run share."""

    train: Subset
    teacher: TeacherCache | None
    augment: Pipeline | None
    training: SGDConfig
    seed: int

    def batches(self, purpose: str, *counters: int) -> list[Tensor]:
        """The rows of each mini-batch of a pass."""
        rows = self.training.batches(len(self.train), self.seed, purpose, *counters)
        return [part.to(self.train.device) for part in rows]

    def at(self, rows: Tensor, draw: np.random.Generator) -> tuple[Tensor, Outputs | None, Tensor]:
        """A mini-batch: inputs (augmented), the teacher's outputs on them, and labels."""
        x, y = self.train.x[rows], self.train.y[rows]
        if self.augment is None:
            return x, None if self.teacher is None else self.teacher.at(rows), y
        x = self.augment(x, [(draw, len(rows))])
        return x, None if self.teacher is None else self.teacher.of(x), y


def optimiser(parameters: list[nn.Parameter], training: SGDConfig) -> torch.optim.SGD:
    """Make SGD with the run's settings; the learning rate is set before every step."""
    return torch.optim.SGD(
        parameters, training.lr, training.momentum, 0.0, training.weight_decay, nesterov=training.nesterov
    )


def momentum(sgd: torch.optim.SGD) -> dict[str, Tensor]:
    """The momentum buffers by the number of their parameter."""
    state = sgd.state_dict()["state"]
    return {str(n): s["momentum_buffer"] for n, s in state.items() if s.get("momentum_buffer") is not None}


def load_momentum(sgd: torch.optim.SGD, buffers: dict[str, Tensor]) -> None:
    """Load the momentum buffers."""
    state = sgd.state_dict()
    state["state"] = {int(n): {"momentum_buffer": value} for n, value in buffers.items()}
    sgd.load_state_dict(state)


def step(sgd: torch.optim.SGD, loss: Tensor, lr: float, clip: float | None, who: str) -> float:
    """Take one SGD step on a mean loss; returns its value."""
    value = float(loss.detach())
    if not np.isfinite(value):
        raise Diverged(f"{who}'s loss is {value}; set a smaller learning rate, or clip gradients (training.clip=10).")
    for group in sgd.param_groups:
        group["lr"] = lr
    sgd.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in sgd.param_groups for p in group["params"]], clip)
    sgd.step()
    return value


Losses = Callable[[Tensor, Outputs | None, Tensor], Tensor]
"""Maps inputs, the teacher's outputs and labels to the student's losses [B]."""


def student_pass(
    data: DistillationData,
    learner: StudentModule,
    sgd: torch.optim.SGD,
    number: int,
    rate: Callable[[int], float],
    losses: Losses,
) -> float:
    """One pass of the student over the data; returns the mean loss.

    Args:
        data: data and settings.
        learner: the student with its layers.
        sgd: the optimiser of the parameters to train.
        number: number of the pass, from 0, counted over the whole run; it determines the mini-batches.
        rate: maps the number of a step in this pass to its learning rate.
        losses: the student's losses.
    """
    learner.train()
    if learner.head is not None:
        learner.head.eval()
    total = 0.0
    batches = data.batches("batches", number)
    for at, rows in enumerate(batches):
        x, teacher, y = data.at(rows, rng.stream(data.seed, "augment", number, at))
        rng.seed_torch(data.seed, "dropout", number, at)
        loss = losses(x, teacher, y).mean()
        total += step(sgd, loss, rate(at), data.training.clip, "the student") * len(rows)
    return total / sum(map(len, batches))


def label_losses(learner: StudentModule) -> Losses:
    """Cross entropy of the student's own head, for the warm start; identical to method ``ce``."""
    return lambda x, teacher, y: cross_entropy(learner.forward_student(x).logits, y)


def term_losses(learner: StudentModule, guide: GuideNet | None, tau_s: float) -> Losses:
    """The sum of the method's terms, with the guide fixed."""

    def losses(x: Tensor, teacher: Outputs | None, y: Tensor) -> Tensor:
        g = None
        if guide is not None and teacher is not None:
            with torch.no_grad():
                g = guide.eval()(teacher.features, teacher.logits)
        return learner.losses(NetworkPair(learner.forward_student(x), teacher, y), g, tau_s)

    return losses


@dataclass
class StudentSnapshot:
    """The student's contributions on which the guide is trained in one round.

    Attributes:
        views: the view of each selective term, [N, ...].
        logits: the student's own logits [N, C].
        deployed_logits: the deployed model's logits [N, C].
        teacher: the teacher's outputs, without maps.
        y: labels [N].
    """

    views: list[Tensor]
    logits: Tensor
    deployed_logits: Tensor
    teacher: Outputs
    y: Tensor

    @property
    def is_wrong(self) -> Tensor:
        """Where the deployed model is wrong, bool [N]."""
        return self.deployed_logits.argmax(1) != self.y


def snapshot_student(data: DistillationData, learner: StudentModule, method: Distiller, round: int) -> StudentSnapshot:
    """Evaluate the student on the training data; with augmentation, on one view of every sample.

    ``round`` is counted from the end of the warm start and determines the view.
    """
    learner.eval()
    batches: list[tuple[list[Tensor], Tensor, Tensor, Outputs]] = []
    all_rows = torch.arange(len(data.train), device=data.train.device)
    with torch.no_grad():
        for at, rows in enumerate(all_rows.split(AT_ONCE)):
            x, teacher, y = data.at(rows, rng.stream(data.seed, "augment-guide", round, at))
            assert teacher is not None
            outputs = learner.forward_student(x)
            pair = NetworkPair(outputs, teacher, y)
            views = [term.view(pair, learner.of(n)) for n, term in method.selective]
            batches.append(
                (views, outputs.logits, learner.deployed_logits(outputs), Outputs(teacher.logits, teacher.features))
            )
    views, logits, deployed_logits, teachers = zip(*batches, strict=True)
    teacher = Outputs(torch.cat([s.logits for s in teachers]), torch.cat([s.features for s in teachers]))
    view_tensors = [torch.cat(parts) for parts in zip(*views, strict=True)]
    return StudentSnapshot(view_tensors, torch.cat(logits), torch.cat(deployed_logits), teacher, data.train.y)


def student_temperature(method: Distiller, snapshot: StudentSnapshot) -> float:
    """τ_s of the first selective term that has one, or 1."""
    temperatures = (term.student_temperature(snapshot.teacher.logits, snapshot.logits) for _, term in method.selective)
    return next((tau for tau in temperatures if tau is not None), 1.0)


def guide_pass(
    data: DistillationData,
    method: Distiller,
    snapshot: StudentSnapshot,
    net: GuideNet,
    sgd: torch.optim.SGD,
    batches: list[Tensor],
    lr: float,
    lagrange: float,
    delta: float,
    tau_s: float,
) -> float:
    """One pass of the guide over the data, with the student fixed; returns its mean Lagrangian.

    On a mini-batch it is Σ of the selective terms + λ [-(1/#wrong) Σ g log s_y - δ]_+, with s the deployed model and
    the price -log s_y as the guide's settings say.
    """
    net.train()
    total = 0.0
    for rows in batches:
        teacher = Outputs(snapshot.teacher.logits[rows], snapshot.teacher.features[rows])
        y = snapshot.y[rows]
        g = net(teacher.features, teacher.logits)
        loss = lagrange * _budget(method, snapshot.deployed_logits[rows], teacher.logits, y, g, delta)
        for (_, term), view in zip(method.selective, snapshot.views, strict=True):
            loss = loss + term.weight * term.guided(view[rows], teacher, y, g, tau_s).mean()
        total += step(sgd, loss, lr, data.training.clip, "the guide") * len(rows)
    return total / sum(map(len, batches))


def guide_values(net: GuideNet, snapshot: StudentSnapshot) -> Tensor:
    """The guide's g on every training sample, [N]."""
    net.eval()
    with torch.no_grad():
        parts = zip(snapshot.teacher.features.split(AT_ONCE), snapshot.teacher.logits.split(AT_ONCE), strict=True)
        return torch.cat([net(f, t) for f, t in parts])


def used_budget(method: Distiller, snapshot: StudentSnapshot, g: Tensor) -> float:
    """-(1/#wrong) Σ g log s_y over the training set, the used part of the budget δ, at the guide's prices."""
    return float(_budget(method, snapshot.deployed_logits, snapshot.teacher.logits, snapshot.y, g, 0.0))


def _budget(method: Distiller, logits: Tensor, teacher: Tensor, y: Tensor, g: Tensor, delta: float) -> Tensor:
    """L_budget at the prices of the method's guide."""
    assert method.guide is not None
    classes = teacher.argmax(-1) if method.guide.price == "teacher" else None
    return budget(logits, y, g, delta, priced=classes, cap=method.guide.cap)


def evaluate(model: nn.Module, samples: Subset) -> Iterator[tuple[str, float]]:
    """Accuracy and mean cross entropy of a model, by name; nothing if there are no samples."""
    if not len(samples):
        return
    model.eval()
    correct, loss = 0, 0.0
    with torch.inference_mode():
        for x, y in zip(samples.x.split(AT_ONCE), samples.y.split(AT_ONCE), strict=True):
            logits = model(x)
            correct += int((logits.argmax(1) == y).sum())
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    yield "accuracy", correct / len(samples)
    yield "cross_entropy", loss / len(samples)
