"""CCVR: the head of a finished run's model is trained again, on features drawn from the clients' class statistics.

Under label skew the head of a federated model is biased towards the classes of the last clients, its features much less
so. Clients therefore send, once after training, sums of their features by class; the server fits a Gaussian to each
class, draws virtual features from it, and trains the head on them. No features leave a client. Luo, Chen, Hu,
Zhang, Liang & Feng, NeurIPS 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegativeInt, Positive
from fedloom.base.registry import Ranged
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.privacy import PrivacySpent, privacy_spent
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.trained import TrainedRun
from fedloom_apps.customise.exchange import Exchange
from fedloom_apps.customise.head import features_of, linear_head, with_head


@dataclass(frozen=True)
class ClassGaussians:
    """The mean and the unbiased covariance of the features of each class, from sums over clients.

    ::

        μ_c = S_c / n_c          Σ_c = (Q_c - n_c μ_c μ_cᵀ) / (n_c - 1)          S_c = Σ_{y=c} φ, Q_c = Σ_{y=c} φφᵀ

    The paper derives the same from each client's own mean and covariance. With one sample Σ_c = 0.

    Attributes:
        n: samples of each class, float64 [C].
        mean: μ, float64 [C, d].
        covariance: Σ, float64 [C, d, d].
    """

    n: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, n: Tensor, first: Tensor, second: Tensor) -> ClassGaussians:
        """The Gaussians from the sums n [C], S [C, d] and the upper triangles of Q, row by row, [C, d (d + 1) / 2]."""
        d, n = first.shape[1], n.clamp(min=0)  # noise may have made it negative
        mean = first / torch.where(n > 0, n, 1.0)[:, None]
        row, column = torch.triu_indices(d, d)
        square = first.new_empty(len(n), d, d)
        square[:, row, column] = square[:, column, row] = second
        centred = square - n[:, None, None] * mean[:, :, None] * mean[:, None, :]
        return cls(n, mean, centred / (n - 1).clamp(min=1)[:, None, None])

    def draw(self, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw ``samples`` virtual features for every class with samples: features [M, d], float64, and classes [M].

        Raises:
            ConfigError: if no class has samples.
        """
        features, classes = [], torch.nonzero(self.n >= 0.5).flatten()  # with noise, sums are no whole numbers
        if not len(classes):
            raise ConfigError(
                "class statistics count no sample of any class: there are none, or uplinks hide them; train with a "
                "larger bound, like method.uplink.clip_noise.clip=1e5, or with less noise."
            )
        for c in classes.tolist():
            normal = rng.stream(seed, "virtual features", c).standard_normal((samples, self.mean.shape[1]))
            size, axes = torch.linalg.eigh(self.covariance[c])  # not Cholesky: features that are always 0 are common
            features.append(self.mean[c] + torch.from_numpy(normal) * size.clamp(min=0).sqrt() @ axes.T)
        return torch.cat(features), classes.repeat_interleave(samples)


def class_moments(features: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """A client's upload: n, S and Q of its samples with features [N, d] and classes [N]; see ``ClassGaussians``."""
    phi, d = features.double(), features.shape[1]
    row, column = torch.triu_indices(d, d)
    one_hot = torch.nn.functional.one_hot(y.long(), classes).double()
    square = [
        (class_features.T @ class_features)[row, column] for class_features in (phi[y == c] for c in range(classes))
    ]
    return {"n": one_hot.sum(0), "first": one_hot.T @ phi, "second": torch.stack(square)}


@dataclass(frozen=True)
class CCVR(Ranged):
    """Classifier calibration with virtual representations: a linear head for all classes alike, after training.

    The head starts from the run's own and minimises the cross entropy of the virtual features by SGD. Clients send C (1
    + d + d (d + 1)/2) numbers in one exchange, through the uplinks of the run's method. Every class has the same number
    of virtual features; a class without samples has none.

    >>> import fedloom as fl
    >>> federation = fl.data.federate("digits", "pathological", clients=5)
    >>> trained, test = fl.run("fedavg", federation, "mlp", rounds=3).trained, federation.test
    >>> model = CCVR()(trained)
    >>> model.evaluate(test.x, test.y)["accuracy"] > trained.server.evaluate(test.x, test.y)["accuracy"] + 0.1
    True

    Args:
        samples: M, virtual features of each class.
        epochs: passes over them; with 0 the head is unchanged.
        batch_size: virtual features per step.
        lr: learning rate of the steps.
        seed: seed of the draws and of the order.
    """

    samples: Count = 200
    epochs: NonNegativeInt = 20
    batch_size: Count = 50
    lr: Positive = 0.05
    seed: int = 0
    citation: ClassVar[str] = "luo2021ccvr"

    def __call__(self, trained: TrainedRun) -> DeployedModel:
        """The server's model with the calibrated head; it predicts, evaluates and is exported like any other."""
        head = linear_head(trained, "ccvr")
        with reproducible():
            gaussians = statistics(trained, head.out_features)
            weight, bias = self.fit(head, *gaussians.draw(self.samples, self.seed))
        return with_head(trained.server, trained.server.module, weight, bias)

    def privacy(self, trained: TrainedRun) -> PrivacySpent | None:
        """The privacy spent by the run and the clients' sums together; None if the run is not private."""
        return privacy_spent(trained.summary, trained.snapshot.server.round, 1, trained.plan.method.uplink)

    def fit(self, head: nn.Linear, features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The head, [C, d] and [C], after SGD on the features [M, d] of classes [M]; ``head`` is where it starts."""
        assert head.bias is not None
        weight, bias = (t.detach().cpu().double().clone() for t in (head.weight, head.bias))
        truth = torch.nn.functional.one_hot(y, head.out_features).double()
        for epoch in range(self.epochs):
            order = torch.from_numpy(rng.stream(self.seed, "virtual order", epoch).permutation(len(y)))
            for rows in order.split(self.batch_size):
                phi = features[rows]
                error = (torch.softmax(phi @ weight.T + bias, 1) - truth[rows]) / len(rows)
                weight, bias = weight - self.lr * error.T @ phi, bias - self.lr * error.sum(0)
        return weight, bias


@dataclass(frozen=True)
class _Uploads(Sequence[dict[str, Tensor]]):
    """The uploads of a run's clients, each computed when it is needed: together they would fill the memory."""

    trained: TrainedRun
    classes: int

    def __len__(self) -> int:
        return self.trained.federation.seen

    def __getitem__(self, client: Any) -> Any:
        if client >= len(self):
            raise IndexError(client)
        samples = self.trained.federation.train.client(client)
        return class_moments(features_of(self.trained.server, samples.x), samples.y.cpu(), self.classes)


def statistics(trained: TrainedRun, classes: int) -> ClassGaussians:
    """The Gaussians of the training samples of all clients that took part, in the run's server features."""
    facts, round = trained.plan.facts, trained.snapshot.server.round
    exchange = Exchange(trained.plan.method.uplink, facts, round, "class covariances")
    exchange.check(trained.plan.local)
    return ClassGaussians.of(**exchange(_Uploads(trained, classes)))
