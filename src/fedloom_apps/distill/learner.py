"""The trained modules: the student with the layers of its terms, the guide, and the deployed model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.errors import ConfigError, in_one_line
from fedloom.experiment.setup import make_model
from fedloom_apps.distill.guide import GuideNet
from fedloom_apps.distill.method import Distiller, DistillTerm, NetworkPair
from fedloom_apps.distill.taps import FeatureTap, Outputs, Sizes
from fedloom_apps.distill.training import SGDConfig


class StudentModule(nn.Module):
    """The student, the layers of its terms, and the teacher's head if it is deployed.

    Args:
        method: provides the terms.
        student: the network to train.
        sizes: output sizes of student and teacher; without a teacher, the student's twice.
        head: the teacher's head.
        training: batch size, and the dtype of factors while training.
    """

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

    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters of the student and its terms' layers."""
        return [p for p in (*self.student.parameters(), *self.layers.parameters()) if p.requires_grad]

    def parts(self) -> dict[str, nn.Module]:
        """The modules of the deployed model by prefix; only the student unless the teacher's head is reused."""
        if self.reuse is None:
            return {"": self.student}
        named = {"student.": self.student, "layers.": self.of(self.reuse), "head.": self.head}
        return {prefix: module for prefix, module in named.items() if module is not None}

    def deployed(self) -> dict[str, Tensor]:
        """A copy of the deployed model's tensors by name."""
        return {
            f"{prefix}{name}": value.detach().clone()
            for prefix, module in self.parts().items()
            for name, value in module.state_dict().items()
        }

    def deploy(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors returned by ``deployed``."""
        for prefix, module in self.parts().items():
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            module.load_state_dict(own)

    def size(self) -> int:
        """The number of parameters of the deployed model."""
        total = sum(p.numel() for module in self.parts().values() for p in module.parameters())
        unused = 0 if self.reuse is None else sum(p.numel() for p in self.taps.model.head.parameters())
        return total - unused


def make_student(make: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> nn.Module:
    """A freshly initialised student, identical to the model of a federated run with that seed."""
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "model")
        return make_model(make).to(dtype)


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
        own = FeatureTap(student).sizes(inputs, dtype)
        theirs = own if teacher is None else FeatureTap(teacher).sizes(inputs, dtype)
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"student or teacher does not accept inputs of shape {inputs}: {in_one_line(error)}."
        raise ConfigError(message) from error
    if own.classes != theirs.classes:
        raise ConfigError(f"the student has {own.classes} outputs, but the teacher {theirs.classes}.")
    head: Any = None if teacher is None else teacher.head
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "layers")
        learner = StudentModule(method, student, (own, theirs), head, training).to(dtype)
    return learner, (own, theirs)


def make_guide(method: Distiller, teacher: Sizes, seed: int, dtype: torch.dtype) -> GuideNet | None:
    """Make the guide's network, if the method has a guide."""
    if method.guide is None:
        return None
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "guide")
        return GuideNet(teacher.features, teacher.classes, method.guide.hidden).to(dtype)


def selective(method: Distiller) -> list[tuple[int, DistillTerm]]:
    """The selective terms with their numbers."""
    return [(number, method.terms[number]) for number in method.selective]
