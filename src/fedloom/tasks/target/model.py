"""A model for another party's unlabelled inputs, from a finished run: class shares by EM, then a head or a mixture.

Sums over the clients are enough for any number of targets. With the server's features φ, clients first send class
sums (``ClassSums``), of which the server makes a discriminant; then distances to its classes (``Discriminant.far``),
and a few times losses and mean posteriors (``Discriminant.answer``), which calibrate it. No sum needs to be known
client by client, so that masked sums do: they pass the uplinks of the run's method (``Exchange``). In a finished run
they are computed from the run's own data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.parts import Uplink
from fedloom.data.augment import pipeline
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.ensemble import last_models, mixing_weights
from fedloom.experiment.privacy import Spent, spent
from fedloom.experiment.runtime import one_thread
from fedloom.experiment.setup import server_data
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.mixing.ssa import SelfSupervised
from fedloom.tasks.target.discriminant import ClassSums, Discriminant
from fedloom.tasks.target.exchange import Exchange
from fedloom.tasks.target.fit import TargetFit
from fedloom.tasks.target.head import features_of, linear_head, with_head
from fedloom.tasks.target.label_shift import LabelShiftCheck, TargetPrior, target_prior

ABSENT = -1e4  # the logit's bias of a class with share 0
EXCHANGES = 20  # with the clients, for the class biases of the calibration


@dataclass(frozen=True)
class TargetModel:
    """A model for a target, and what was found out about it.

    Attributes:
        model: it predicts, evaluates and is exported like any other.
        prior: the estimated class shares, with intervals.
        known: Σ_c π_c n_kc / n_c, the part of the target that is known from client k, [K]; sums to 1. NaN where
            uplinks keep the figures of single clients from the server.
        check: of the assumption that the target differs in its class shares alone.
        p: the weights of the clients' models in it, float64 [K]; None if it is the server's model with another head.
    """

    model: DeployedModel
    prior: TargetPrior
    known: np.ndarray
    check: LabelShiftCheck
    p: np.ndarray | None = None


class ClassModels:
    """The clients' classes in the features of a run's server model, for any number of targets.

    The statistics are those of the clients that took part in training, not of unseen ones.

    >>> import fedloom as fl
    >>> federation = fl.data.federate("digits", "niid1", clients=5, target="skew")
    >>> trained = fl.run("fedavg", federation, "mlp", rounds=3).trained
    >>> found = ClassModels(trained).target_head(federation.unlabelled.x)
    >>> int(found.known.argmax()), found.check.holds
    (0, True)

    Args:
        trained: a finished run.
        shrinkage: of the covariance within classes; see ``ClassSums.discriminant``.
        uplink: what the clients' statistics pass on their way; by default the uplinks of the run's method. If they add
            noise, the clients are asked three times only, and the scores are calibrated by a temperature alone.

    Raises:
        ConfigError: if the run has no classifier with ``features`` and a linear ``head`` at the server, its clients'
            data are elsewhere, or an uplink cannot cover the statistics.
    """

    def __init__(self, trained: TrainedRun, shrinkage: float = 0.01, uplink: Sequence[Uplink] | None = None) -> None:
        self.trained, self.server = trained, trained.server
        train, classes = trained.federation.train, linear_head(trained, "a model for a target").out_features
        with one_thread():
            clients = [train.client(k) for k in range(trained.federation.seen)]
            held = [(self.features(own.x), own.y.cpu()) for own in clients]
            self.sums = [ClassSums.of(*one, classes) for one in held]
            plan = trained.plan
            uplinks = plan.method.uplink if uplink is None else tuple(uplink)
            self.total = total = Exchange(uplinks, plan.facts, trained.snapshot.server.round)
            plain = ClassSums(**total([vars(one) for one in self.sums])).discriminant(shrinkage)
            self.distances = total([{"distances": plain.far(*one)} for one in held])["distances"]

            def ask(beta: Tensor) -> tuple[Tensor, Tensor]:
                answers = (plain.answer(*one, beta) for one in held)
                found = total([{"losses": losses, "posteriors": posteriors} for losses, posteriors in answers])
                return found["losses"], found["posteriors"]

            self.discriminant: Discriminant = plain.calibrated(ask, 0 if total.is_private else EXCHANGES)

    @property
    def privacy(self) -> Spent | None:
        """What the run and the clients' statistics have spent together; None if the run is not private."""
        run, total = self.trained, self.total
        return spent(run.summary, run.snapshot.server.round, total.asked, total.uplinks)

    def features(self, x: Tensor) -> Tensor:
        """φ(x), [N, d], of inputs as the run's data hold them."""
        return features_of(self.server, x)

    def target_head(self, x: Any, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The model for a target: logits w_cᵀφ(x) + b_c, w_c = W⁻¹μ_c/T, b_c = log π_c - ½ μ_cᵀw_c + β_c.

        Heads of several targets differ in b alone.

        Args:
            x: unlabelled inputs [N, ...] of the target, as ``DeployedModel.predict`` takes them.
            resamples: of the bootstrap, for the intervals of the shares.
            seed: of the bootstrap.

        Raises:
            DataError: if the inputs do not fit the run's data.
        """
        with one_thread():
            phi = self.features(self.server.inputs(x))
            prior = target_prior(self.discriminant.scores(phi), resamples, seed=seed)
        return self._found(prior, phi, self.head(torch.from_numpy(prior.shares)))

    def target_prior(self, x: Any, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The target's class shares alone, with intervals, clients and check; the model is the server's as it is.

        Args:
            x: as in ``target_head``.
            resamples: likewise.
            seed: likewise.

        Raises:
            DataError: if the inputs do not fit the run's data.
        """
        with one_thread():
            phi = self.features(self.server.inputs(x))
            prior = target_prior(self.discriminant.scores(phi), resamples, seed=seed)
        return self._found(prior, phi, self.server)

    def head(self, shares: Tensor) -> DeployedModel:
        """The server's features with the head of ``target_head`` for class shares π, float64 [C]."""
        bias = torch.where(shares > 0, shares.clamp(min=1e-300).log() + self.discriminant.offsets, ABSENT)
        return with_head(self.server, self.server.module, self.discriminant.weights, bias.clamp(min=ABSENT))

    def target_fit(self, x: Any, fit: TargetFit | None = None, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The model for a target as a mixture of the clients' last models, Σ_k p_k θ_k, fitted through that network.

        What p is fitted to are the classes of the inputs as the discriminant tells them, r_c(x) = π_c e^{l_c(x)} /
        Σ_c' π_c' e^{l_c'(x)}; ``TargetFit`` has the loss. It starts from FedAvg's p_k = n_k / Σ n. Mixing with the
        part of the target that each client knows would be wrong for broad targets: a mean of networks is another
        network, and its weights must be chosen for that one.

        Args:
            x: as in ``target_head``.
            fit: steps, learning rate and batch size.
            resamples: as in ``target_head``.
            seed: likewise.

        Raises:
            ConfigError: if the run did not keep its clients' last models, or has networks of different size.
            DataError: if the inputs do not fit the run's data.
        """
        run = self.trained
        clients, models, buffers = last_models(run.plan, run.snapshot)
        with one_thread():
            given = self.server.inputs(x)
            phi = self.features(given)
            scores = self.discriminant.scores(phi)
            prior = target_prior(scores, resamples, seed=seed)
            r = torch.softmax(scores + torch.from_numpy(prior.shares).log(), -1)
            sizes = torch.from_numpy(run.plan.population.sizes[clients]).double()
            data = server_data(run.plan, given.to(models.device))
            found = (fit or TargetFit())(data, models, buffers, r, sizes / sizes.sum())
        weights = found.p.to(models)
        merged = copy.deepcopy(self.server.module)
        run.plan.layout.write(merged, weights @ models, weights @ buffers)
        head: nn.Linear = merged.head  # type: ignore[assignment]
        model = with_head(self.server, merged, found.tau * head.weight, found.tau * head.bias + found.b.to(head.bias))
        p = np.zeros(len(run.federation))
        p[clients] = found.p.numpy()
        return self._found(prior, phi, model, p)

    def fedssa(
        self,
        x: Any,
        policy: SelfSupervised | None = None,
        views: Sequence[str | Mapping[str, Any]] = ("jitter", "blur"),
        resamples: int = 200,
        seed: int = 0,
    ) -> TargetModel:
        """The clients' last models mixed by FedSSA, learnt once: Σ_k p_k θ_k with p as in ``SelfSupervised``.

        The class shares and the check are told beside it; the mixture does not depend on them.

        Args:
            x: as in ``target_head``.
            policy: its settings; by default those of ``SelfSupervised``.
            views: augmentations that make two views of each input.
            resamples: as in ``target_head``.
            seed: likewise.

        Raises:
            ConfigError: as ``target_fit``, or for unsuitable views.
            DataError: if the inputs do not fit the run's data.
        """
        run, rounds = self.trained, self.trained.snapshot.server.round
        change = pipeline(views, run.federation.train.arrays)
        clients, models, buffers = last_models(run.plan, run.snapshot)
        with one_thread():
            given = self.server.inputs(x)
            phi = self.features(given)
            prior = target_prior(self.discriminant.scores(phi), resamples, seed=seed)
            data = server_data(run.plan, given.to(models.device), change)
            own = mixing_weights(policy or SelfSupervised(), run.plan, rounds, clients, models, buffers, data)
        weights = torch.from_numpy(own).to(models)
        merged = copy.deepcopy(self.server.module)
        run.plan.layout.write(merged, weights @ models, weights @ buffers)
        p = np.zeros(len(run.federation))
        p[clients] = own
        return self._found(prior, phi, replace(self.server, module=merged.eval()), p)

    def _found(self, prior: TargetPrior, phi: Tensor, model: DeployedModel, p: np.ndarray | None = None) -> TargetModel:
        """The model with what is known of the target, from features [M, d] of its inputs."""
        pi = torch.from_numpy(prior.shares)
        counts = torch.stack([one.n for one in self.sums])
        known = np.zeros(len(self.trained.federation))
        known[: len(counts)] = (pi * counts / counts.sum(0).clamp(min=1)).sum(1).numpy()
        if self.total.only_sums:
            known = np.full_like(known, np.nan)
        return TargetModel(model, prior, known, self._check(phi, pi), p)

    def _check(self, phi: Tensor, pi: Tensor) -> LabelShiftCheck:
        """The target's mean distance to the nearest class beside that of the clients' samples, in the same shares."""
        n, first, second = self.distances
        means, squares = ((pi * part / torch.where(n > 0, n, 1)).sum() for part in (first, second))
        found = self.discriminant.distances(phi)
        spread = (squares - means**2).clamp(min=0).sqrt()
        return LabelShiftCheck(float(found.mean()), float(means), float(spread), len(phi))
