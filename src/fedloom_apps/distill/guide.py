"""The guide's network, and the fit of the student's temperature to the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError


class GuideNet(nn.Module):
    """g(x) in [0, 1] from the teacher's features and logits: two hidden layers with batch normalisation and ReLU.

    Acar, thesis 2023, A.1.5. It receives neither the student's outputs nor the input, and is not used at inference.

    Args:
        features: d, the number of the teacher's features.
        classes: C, the number of classes.
        hidden: units of the hidden layers.

    >>> net = GuideNet(6, 3).eval()
    >>> float(net(torch.zeros(2, 6), torch.zeros(2, 3)).detach().max()) < 1
    True
    >>> [tuple(p.shape) for p in net.parameters() if p.ndim == 2]
    [(64, 9), (128, 64), (1, 128)]
    """

    def __init__(self, features: int, classes: int, hidden: Sequence[int] = (64, 128)) -> None:
        super().__init__()
        before = features + classes
        self.body = nn.Sequential()
        for width in hidden:
            self.body.extend([nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()])
            before = width
        self.head = nn.Linear(before, 1)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """g [B] of the teacher's features [B, d] and logits [B, C]."""
        return self.head(self.body(torch.cat([features.flatten(1), logits], 1))).squeeze(1).sigmoid()


def fit_temperature(
    teacher_logits: Tensor, student_logits: Tensor, tau: float, within: tuple[float, float] = (0.05, 50.0)
) -> float:
    """τ_s = argmin_{τ'} Σ_i KL(t^τ(x_i)‖s^{τ'}(x_i)), the temperature at which the student is closest to the teacher.

    As a function of 1/τ' the sum is convex (log-sum-exps plus a linear term), so a bounded search over log τ' finds its
    only minimum; if that lies outside ``within``, the nearer end is returned. Acar, thesis 2023, §6.3, below eq. (6.4).

    Args:
        teacher_logits: [N, C].
        student_logits: [N, C].
        tau: τ > 0, the teacher's temperature.
        within: the smallest and the largest τ_s.

    >>> said = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    >>> round(fit_temperature(said, 2 * said, tau=4.0), 3)  # twice the logits, twice the temperature
    8.0
    """
    from scipy.optimize import minimize_scalar  # slow to import, and needed once a run

    if not (tau > 0 and 0 < within[0] < within[1]):
        raise ConfigError(
            f"a student's temperature is fitted to a positive tau within an interval of positive ones, "
            f"not to {tau:g} within {within[0]:g} and {within[1]:g}."
        )
    t = (teacher_logits.detach().double() / tau).softmax(-1)
    s = student_logits.detach().double()

    def cross(at: float) -> float:
        return -float((t * (s / exp(at)).log_softmax(-1)).sum(-1).mean())

    minimum = minimize_scalar(cross, bounds=(log(within[0]), log(within[1])), method="bounded", options={"xatol": 1e-6})
    return exp(float(minimum.x))
