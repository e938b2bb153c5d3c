"""A model for another party's unlabelled inputs, from a finished run: class shares by EM, then a head or a mixture.

Sums over the clients are enough for any number of targets. With the server's features φ, clients first send class sums
(``ClassSums``), from which the server computes a discriminant; then distances to its classes
(``Discriminant.distance_sums``), and a few times losses and mean posteriors (``Discriminant.calibration_sums``), which
calibrate it. The server only needs sums, so masked ones suffice: they pass the uplinks of the run's method
(``Exchange``). In a finished run they are computed from the run's own data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.core.parts import Uplink
from fedloom.data.augment import pipeline
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.federated import RunResult
from fedloom.experiment.privacy import PrivacySpent, privacy_spent
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import server_data
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.mixing.ssa import SelfSupervised
from fedloom.rounds.aggregate import mixture
from fedloom_apps.customise.ensemble import TargetFit, last_models, mixing_weights
from fedloom_apps.customise.exchange import Exchange
from fedloom_apps.customise.head import features_of, linear_head, with_head
from fedloom_apps.customise.label_shift import ClassSums, Discriminant, LabelShiftCheck, TargetPrior, target_prior

ABSENT = -1e30  # the logit's bias of a class with share 0, finite in float32
EXCHANGES = 20  # with the clients, for the class biases of the calibration
ONCE = 3  # further exchanges: class sums, distances, and the losses that decide the temperature


@dataclass(frozen=True)
class TargetFacts:
    """Estimated facts about a target.

    Attributes:
        prior: the estimated class shares, with intervals.
        known: Σ_c π_c n_kc / n_c, the part of the target that is known from client k, [K]; sums to 1. NaN if uplinks
            hide the single clients' numbers from the server.
        check: the check of the assumption that the target differs in its class shares alone.
    """

    prior: TargetPrior
    known: np.ndarray
    check: LabelShiftCheck


@dataclass(frozen=True)
class TargetModel:
    """A model for a target, with the attributes of ``TargetFacts``.

    Attributes:
        model: the model, which predicts, is evaluated and exported like any other.
        find: computes the facts, which need class statistics, when they are first read.
        p: the weights of the clients' models in it, float64 [K]; None if it is the server's model with another head.
    """

    model: DeployedModel
    find: Callable[[], TargetFacts]
    p: np.ndarray | None = None

    @cached_property
    def facts(self) -> TargetFacts:
        """The estimated facts about the target."""
        return self.find()

    @property
    def prior(self) -> TargetPrior:
        return self.facts.prior

    @property
    def known(self) -> np.ndarray:
        return self.facts.known

    @property
    def check(self) -> LabelShiftCheck:
        return self.facts.check


class ClassFit(NamedTuple):
    """The server's fit to the clients' statistics."""

    sums: list[ClassSums]
    discriminant: Discriminant
    distances: Tensor


class ClassModels:
    """The clients' classes in the features of a run's server model, for any number of targets.

    The statistics are those of the clients that took part in training, not of unseen ones. Clients are asked for them
    once, when they are first needed; ``fedssa`` makes its model without.

    >>> import fedloom as fl
    >>> federation = fl.data.federate("digits", "niid1", clients=5, target="skew")
    >>> result = fl.run("fedavg", federation, "mlp", rounds=3)
    >>> target = ClassModels(result).target_head(federation.unlabelled.x)
    >>> int(target.known.argmax()), target.check.holds
    (0, True)

    Args:
        trained: a finished run, loaded or as ``fl.run`` returns it.
        shrinkage: shrinkage of the covariance within classes; see ``ClassSums.discriminant``.
        uplink: the uplinks of the clients' statistics; by default those of the run's method. If they add noise, the
            clients are asked only three times, and the scores are calibrated by a temperature alone.

    Raises:
        ConfigError: if the run has no whole model at the server. Where statistics are needed, if that is not a
            classifier with ``features`` and a linear ``head``, the clients' data are elsewhere, an uplink cannot cover
            the statistics, or the run kept single samples private (``local.dp_clip``) and no private uplink does.
    """

    def __init__(
        self, trained: TrainedRun | RunResult, shrinkage: float = 0.01, uplink: Sequence[Uplink] | None = None
    ) -> None:
        trained = trained.trained if isinstance(trained, RunResult) else trained
        self.trained, self.server, self.shrinkage = trained, trained.server, shrinkage
        uplinks = trained.plan.method.uplink if uplink is None else tuple(uplink)
        question = f"class statistics, shrinkage {shrinkage}"
        self.total = Exchange(uplinks, trained.plan.facts, trained.snapshot.server.round, question)

    @cached_property
    def statistics(self) -> ClassFit:
        """The sums over clients, requested from them on first access."""
        total, train = self.total, self.trained.federation.train
        classes = linear_head(self.trained, "a model for a target").out_features
        total.check(self.trained.plan.local)
        with reproducible():
            clients = [train.client(k) for k in range(self.trained.federation.seen)]
            samples = [(self.features(client.x), client.y.cpu()) for client in clients]
            sums = [ClassSums.of(*sample, classes) for sample in samples]
            plain = ClassSums(**total([vars(client_sums) for client_sums in sums])).discriminant(self.shrinkage)
            distances = total([{"distances": plain.distance_sums(*sample)} for sample in samples])["distances"]

            def ask(beta: Tensor) -> tuple[Tensor, Tensor]:
                answers = (plain.calibration_sums(*client, beta) for client in samples)
                totals = total([{"losses": losses, "posteriors": posteriors} for losses, posteriors in answers])
                return totals["losses"], totals["posteriors"]

            return ClassFit(sums, plain.calibrated(ask, self.exchanges), distances)

    @property
    def sums(self) -> list[ClassSums]:
        """The class sums of each client."""
        return self.statistics.sums

    @property
    def discriminant(self) -> Discriminant:
        """The classes of all clients together."""
        return self.statistics.discriminant

    @property
    def exchanges(self) -> int:
        """Number of exchanges with the clients for the class biases of the calibration."""
        return 0 if self.total.is_private else EXCHANGES

    @property
    def privacy(self) -> PrivacySpent | None:
        """The privacy spent by the run and the clients' statistics together; None if the run is not private."""
        run = self.trained
        return privacy_spent(run.summary, run.snapshot.server.round, ONCE + self.exchanges, self.total.uplinks)

    def features(self, x: Tensor) -> Tensor:
        """φ(x), [N, d], of inputs as the run's data hold them."""
        return features_of(self.server, x)

    def target_head(self, x: Any, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The model for a target: logits w_cᵀφ(x) + b_c, w_c = W⁻¹(μ_c - μ̄)/T, b_c = log π_c + β_c - ½ (μ_c + μ̄)ᵀw_c.

        μ̄ is the mean of the clients' samples.
        Heads of several targets differ in b alone.

        Args:
            x: unlabelled inputs [N, ...] of the target, as ``DeployedModel.predict`` takes them.
            resamples: number of bootstrap samples, for the intervals of the shares.
            seed: seed of the bootstrap.

        Raises:
            DataError: if the inputs do not fit the run's data.
        """
        facts = self.facts(self.server.inputs(x), resamples, seed)
        return TargetModel(self.head(torch.from_numpy(facts.prior.shares)), lambda: facts)

    def target_prior(self, x: Any, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The target's class shares alone, as in ``target_head``; the model is the server's, unchanged.

        Raises:
            DataError: if the inputs do not fit the run's data.
        """
        facts = self.facts(self.server.inputs(x), resamples, seed)
        return TargetModel(self.server, lambda: facts)

    def head(self, shares: Tensor) -> DeployedModel:
        """The server's features with the head of ``target_head`` for class shares π, float64 [C]."""
        offsets = self.discriminant.offsets
        present = (shares > 0) & (self.discriminant.n > 0)
        bias = torch.where(present, shares.clamp(min=1e-300).log() + offsets, ABSENT)
        return with_head(self.server, self.server.module, self.discriminant.weights, bias)

    def target_fit(self, x: Any, fit: TargetFit | None = None, resamples: int = 200, seed: int = 0) -> TargetModel:
        """The model for a target as a mixture of the clients' last models, Σ_k p_k θ_k, fitted through that network.

        p is fitted to the class probabilities that the discriminant gives, r_c(x) = π_c e^{l_c(x)} / Σ_c' π_c'
        e^{l_c'(x)}; ``TargetFit`` has the loss. It starts from FedAvg's p_k = n_k / Σ n. Mixing in proportion to the
        part of the target that each client knows would be wrong for broad targets: a mean of networks is another
        network, for which the weights must be chosen.

        Raises:
            ConfigError: if the run did not keep its clients' last models, or has networks of different size.
            DataError: if the inputs do not fit the run's data.
        """
        run = self.trained
        clients, models, buffers = last_models(run.plan, run.snapshot)
        inputs = self.server.inputs(x)
        facts = self.facts(inputs, resamples, seed)
        with reproducible():
            scores = self.discriminant.scores(self.features(inputs))
            r = torch.softmax(scores + torch.from_numpy(facts.prior.shares).log(), -1)
            sizes = torch.from_numpy(run.plan.population.sizes[clients]).double()
            data = server_data(run.plan, inputs.to(models.device))
            fitted = (fit or TargetFit())(data, models, buffers, r, sizes / sizes.sum())
        merged = self._merged(fitted.p, models, buffers)
        head: nn.Linear = merged.head  # type: ignore[assignment]
        model = with_head(
            self.server, merged, fitted.tau * head.weight, fitted.tau * head.bias + fitted.b.to(head.bias)
        )
        return TargetModel(model, lambda: facts, self._weights(clients, fitted.p.numpy()))

    def fedssa(
        self,
        x: Any,
        policy: SelfSupervised | None = None,
        views: Sequence[str | Mapping[str, Any]] = ("jitter", "blur"),
        resamples: int = 200,
        seed: int = 0,
    ) -> TargetModel:
        """The clients' last models mixed by FedSSA, learnt once: Σ_k p_k θ_k with p as in ``SelfSupervised``.

        ``views`` makes the two views of each input. The mixture needs no class statistics: clients are asked for them
        when the class shares or the check are first read.

        Raises:
            ConfigError: as ``target_fit``, or for unsuitable views.
            DataError: if the inputs do not fit the run's data.
        """
        run, rounds = self.trained, self.trained.snapshot.server.round
        if (like := run.federation.train.arrays.x).ndim != 4:
            raise ConfigError(
                f"fedssa compares augmented views of images, but this run's inputs have shape {list(like.shape[1:])}; "
                "choose target_head, target_fit or ccvr."
            )
        change = pipeline(views, run.federation.train.arrays)
        clients, models, buffers = last_models(run.plan, run.snapshot)
        with reproducible():
            inputs = self.server.inputs(x)
            data = server_data(run.plan, inputs.to(models.device), change)
            p = mixing_weights(policy or SelfSupervised(), run.plan, rounds, clients, models, buffers, data)
        model = replace(self.server, module=self._merged(torch.from_numpy(p), models, buffers).eval())
        return TargetModel(model, lambda: self.facts(inputs, resamples, seed), self._weights(clients, p))

    def facts(self, inputs: Tensor, resamples: int = 200, seed: int = 0) -> TargetFacts:
        """Class shares, clients and the check of inputs [M, ...] as the run's data hold them."""
        with reproducible():
            discriminant, phi = self.discriminant, self.features(inputs)
            prior = target_prior(discriminant.scores(phi), resamples, seed=seed)
            pi = torch.from_numpy(prior.shares)
            counts = torch.stack([sums.n for sums in self.sums])
            known_shares = np.zeros(len(self.trained.federation))
            known_shares[: len(counts)] = (pi * counts / counts.sum(0).clamp(min=1)).sum(1).numpy()
            if self.total.only_sums:
                known_shares = np.full_like(known_shares, np.nan)
            return TargetFacts(prior, known_shares, self._check(phi, pi))

    def _check(self, phi: Tensor, pi: Tensor) -> LabelShiftCheck:
        """The target's mean distance to the nearest class beside that of the clients' samples, in the same shares."""
        n, first, second = self.statistics.distances
        means, squares = ((pi * part / torch.where(n > 0, n, 1)).sum() for part in (first, second))
        distances = self.discriminant.distances(phi)
        spread = (squares - means**2).clamp(min=0).sqrt()
        return LabelShiftCheck(float(distances.mean()), float(means), float(spread), len(phi))

    def _merged(self, p: Tensor, models: Tensor, buffers: Tensor) -> nn.Module:
        """Σ p_k θ_k in a copy of the server's network, from models [K, P], buffers [K, B] and weights [K]."""
        module, weights = copy.deepcopy(self.server.module), p.to(models)
        self.trained.plan.layout.write(module, weights @ models, mixture(weights, buffers))
        return module

    def _weights(self, clients: np.ndarray, p: np.ndarray) -> np.ndarray:
        """The weights of some clients' models among those of all, [K]."""
        weights = np.zeros(len(self.trained.federation))
        weights[clients] = p
        return weights
