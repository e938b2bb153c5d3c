"""Client models of a finished run: mix them for a target distribution, or ensemble them per sample.

Mixing weights for a target, fitted through the merged network to the probable classes of its inputs.

FedSSA after training (its table 3) learns mixing coefficients for the last client models of any method. Sample-wise
FedSSA (its table 2) needs no target: it learns coefficients for every test sample from random views of that sample, and
mixes predictions instead of models.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegativeInt, Positive, check_ranges
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Federation
from fedloom.core.parts import Mixing
from fedloom.core.server_data import CHUNK, ServerData, logits_of, view_logits
from fedloom.core.slots import label
from fedloom.data.augment import pipeline
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult
from fedloom.experiment.runtime import pick_device, reproducible
from fedloom.experiment.setup import make_plan, server_data, to_device
from fedloom.experiment.snapshot import Snapshot
from fedloom.parts.mixing.ssa import SelfSupervised, combined
from fedloom.rounds.aggregate import mixture
from fedloom.rounds.plan import ClientPlan


@dataclass(frozen=True)
class TargetFit:
    """The minimum over (a, τ, b) of the mean of CE(r(x), softmax(τ f(x; Σ_k p_k θ_k) + b)), p = softmax(a).

    f(x; θ) are the logits of the network with the parameters θ: the weights are chosen for the merged network, whose
    predictions are not the mixture of its parents'. τ and b compensate for the effect of merging on the scale of the
    logits and on the bias of the head; they become part of the head.

    Args:
        steps: steps of Adam in (a, log τ, b), from given weights, τ = 1 and b = 0. With 0 the weights are unchanged.
        lr: learning rate of Adam.
        batch_size: inputs per step; the inputs are passed through in a new order each time.
    """

    steps: NonNegativeInt = 60
    lr: Positive = 0.2
    batch_size: Count = 256

    def __post_init__(self) -> None:
        check_ranges(self, "target_fit: ")

    def __call__(self, data: ServerData, models: Tensor, buffers: Tensor, r: Tensor, p: Tensor) -> Fitted:
        """Fit to the target's inputs.

        Args:
            data: the inputs [M, ...], and the network.
            models: θ_k, the clients' parameters [K, P].
            buffers: their buffers [K, B], which are merged with the same weights.
            r: probabilities of the classes of each input, [M, C].
            p: weights to start from, [K], on the simplex; a weight of 0 stays 0.
        """
        a = p.double().log().requires_grad_()
        log_tau = torch.zeros((), dtype=torch.float64, requires_grad=True)
        b = torch.zeros(r.shape[1], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([a, log_tau, b], lr=self.lr)
        with torch.enable_grad():
            for _, some in islice(data.batches(0, self.batch_size), self.steps):
                weights = torch.softmax(a, 0).to(models)
                logits = data.logits(weights @ models, mixture(weights, buffers), data.inputs[some])
                log_q = torch.log_softmax(log_tau.exp() * logits.cpu().double() + b, -1)
                optimiser.zero_grad()
                (-(r[some] * log_q).sum(-1).mean()).backward()
                optimiser.step()
        return Fitted(torch.softmax(a.detach(), 0), float(log_tau.detach().exp()), b.detach())


@dataclass(frozen=True)
class Fitted:
    """Weights p [K], scale τ and biases b [C], float64: logits are τ f(x; Σ_k p_k θ_k) + b."""

    p: Tensor
    tau: float
    b: Tensor


SAMPLE_WISE = SelfSupervised(variance=1.0, optimiser="adam", lr=0.02, steps=10, draws=4)


@dataclass(frozen=True)
class CustomModel:
    """A model for a target distribution, mixed from client models.

    Attributes:
        clients: the clients whose models are mixed, int64 [K].
        p: their mixing coefficients, float64 [K].
        model: Σ p_k θ_k, in evaluation mode.
        accuracy: its accuracy on the common test set, in [0, 1].
        before: the accuracy of the run's own server model, likewise.
    """

    clients: np.ndarray
    p: np.ndarray
    model: nn.Module
    accuracy: float
    before: float


@dataclass(frozen=True)
class EnsembleAccuracies:
    """Accuracies on the common test set, in [0, 1]: the rows of FedSSA's table 2.

    Attributes:
        alone: accuracy of each client model, float64 [K]; ``local`` is the mean.
        server: accuracy of the run's server model.
        ensemble: accuracy of softmax(mean of the client models' logits).
        sample_wise: accuracy of softmax(Σ p_k logits_k) with coefficients learnt for every sample.
        p: those coefficients, float64 [N, K].
    """

    alone: np.ndarray
    server: float
    ensemble: float
    sample_wise: float
    p: np.ndarray

    @property
    def local(self) -> float:
        """The mean accuracy of single client models."""
        return float(self.alone.mean())


def after_training(experiment: Experiment, result: RunResult, policy: Mixing | None = None) -> CustomModel:
    """FedSSA after training: mix the last client models of a run, using unlabelled inputs of the target distribution.

    A run in a run directory can be read back, without further training, by ``fedloom.run(experiment, out=directory,
    resume=True)``.

    Args:
        experiment: the experiment; its federation needs unlabelled inputs, and its ``views`` are used.
        result: its result.
        policy: the mixing policy: FedSSA with its defaults, or another one that learns at the server.
    """
    policy = SelfSupervised() if policy is None else policy
    if experiment.federation.unlabelled is None:
        raise ConfigError("the data have no unlabelled inputs of a target; choose one, like target=skew.")
    if policy.needs.losses:
        raise ConfigError(f"mixing {label(policy)!r} needs losses of a round in progress, but this run is over.")
    with reproducible():
        here = _Ensemble(experiment, result)
        data = here.data(views="views" in policy.needs)
        p = mixing_weights(policy, here.plan, here.round, here.clients, here.models, here.buffers, data)
        weights = torch.from_numpy(p).to(here.models)
        theta, buffers = weights @ here.models, mixture(weights, here.buffers)
        model = copy.deepcopy(here.plan.model).to(theta.device).eval()
        here.plan.layout.write(model, theta, buffers)
        logits = logits_of(data, theta[None], buffers[None], here.federation.test.x)[:, 0]
        return CustomModel(here.clients, p, model, accuracy(logits, here.federation.test.y), here.before(result, data))


def mixing_weights(
    policy: Mixing,
    plan: ClientPlan,
    rounds: int,
    clients: np.ndarray,
    models: Tensor,
    buffers: Tensor,
    data: ServerData,
) -> np.ndarray:
    """The coefficients p, float64 [K], that a policy gives to the last models of a finished run.

    Args:
        policy: the mixing policy.
        plan: the run's client plan.
        rounds: number of rounds that were run; the views of the last one are drawn again.
        clients: the clients whose models they are, int64 [K].
        models: θ_k, [K, P].
        buffers: their buffers [K, B].
        data: the target's inputs, with views if the policy needs some.
    """
    samples = plan.population.sizes[clients]
    info = RoundInfo(
        rounds - 1, 0.0, clients, samples, np.zeros(len(samples)), plan.facts._replace(rounds=rounds),
        torch.zeros_like(models[0]), updates=[-theta for theta in models], buffers=list(buffers), server_data=data,
    )  # fmt: skip
    return policy.coefficients({}, info)[1]


def sample_wise(experiment: Experiment, result: RunResult, policy: SelfSupervised = SAMPLE_WISE) -> EnsembleAccuracies:
    """Sample-wise FedSSA and the ensembles it is compared with, on the common test set.

    Every test sample is treated separately; labels are used only to compute accuracies.

    Args:
        experiment: the experiment; its ``views`` are used.
        result: its result; with method ``local`` this is "local training + ensemble".
        policy: λ_var, λ_we, optimiser, lr, steps (a sample is one batch) and draws.
    """
    with reproducible():
        here = _Ensemble(experiment, result)
        test = here.federation.test
        logits, p = [], []
        for number, x in enumerate(test.x.split(CHUNK)):
            data = replace(here.data(views=True), inputs=x)
            plain = logits_of(data, here.models, here.buffers, x)
            views = [
                view_logits(data, here.models, here.buffers, here.round, number, draw) for draw in range(policy.draws)
            ]
            first, second = (torch.stack(view) for view in zip(*views, strict=True))
            logits.append(plain)
            p.append(sample_coefficients(first, second, policy))
        z, weights = torch.cat(logits), torch.cat(p)
        return EnsembleAccuracies(
            np.array([accuracy(z[:, k], test.y) for k in range(z.shape[1])]),
            here.before(result, here.data(views=False)),
            accuracy(ensemble(z), test.y),
            accuracy(combined(weights, z.double()), test.y),
            weights.cpu().numpy(),
        )


def sample_coefficients(first: Tensor, second: Tensor, policy: SelfSupervised = SAMPLE_WISE) -> Tensor:
    """Per-sample coefficients p, float64 [N, K]; all samples are optimised in parallel.

    Args:
        first: the K models' logits on the first views, [draws, N, K, C]; the loss is the mean over draws.
        second: logits on the second views, likewise.
        policy: settings of the optimisation.

    >>> draws = torch.zeros(1, 3, 2, 4)
    >>> sample_coefficients(draws, draws)[0]
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    a = torch.zeros(first.shape[1:3], dtype=torch.float64, device=first.device)
    pair = (first.double(), second.double())
    return policy.learnt(a, [pair] * policy.steps)


def ensemble(logits: Tensor) -> Tensor:
    """softmax((1/K) Σ_k logits_k) [N, C] from logits [N, K, C]: FedSSA's mixed prediction with uniform p.

    >>> ensemble(torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])).argmax(-1)
    tensor([1])
    """
    return torch.softmax(logits.mean(1), -1)


def accuracy(scores: Tensor, y: Tensor) -> float:
    """The fraction of rows of ``scores`` [N, C] whose largest entry is at y [N].

    >>> accuracy(torch.eye(2), torch.tensor([0, 0]))
    0.5
    """
    return float((scores.argmax(-1) == y).double().mean())


class _Ensemble:
    """The last models of a run's clients with all their parameters, shared and private."""

    def __init__(self, experiment: Experiment, result: RunResult) -> None:
        self.experiment = experiment
        device = pick_device(experiment.device)
        self.federation: Federation = to_device(experiment.federation, getattr(torch, experiment.dtype), device)
        plan = make_plan(experiment, self.federation, device)
        self.round = result.snapshot.server.round
        self.clients, self.models, self.buffers = last_models(plan, result.snapshot)
        layout = plan.layout
        full_layout = replace(layout, shared_size=layout.size, shared_buffers=layout.buffer_size)
        self.plan: ClientPlan = replace(plan, layout=full_layout)

    def data(self, views: bool) -> ServerData:
        """The model and the target's inputs, or the test inputs if there is no target."""
        hidden, train = self.federation.unlabelled, self.federation.train
        change = pipeline(self.experiment.views, train.arrays) if views else None
        return server_data(self.plan, self.federation.test.x if hidden is None else hidden.x, change)

    def before(self, result: RunResult, data: ServerData) -> float:
        """The accuracy of the run's server model."""
        theta, buffers = (t.to(self.models.device) for t in self.plan.layout.read(result.model))
        test = self.federation.test
        return accuracy(logits_of(data, theta[None], buffers[None], test.x)[:, 0], test.y)


def last_models(plan: ClientPlan, snapshot: Snapshot) -> tuple[np.ndarray, Tensor, Tensor]:
    """The clients that have participated, int64 [K], and their last models [K, P] and buffers [K, B].

    Private parameters and buffers are included.
    """
    if plan.has_levels:
        raise ConfigError("the clients' last models are networks of different size, which cannot be mixed as one.")
    layout, last = plan.layout, snapshot.last
    split, shared_buffers = layout.shared_size, layout.shared_buffers
    if split and last is None:
        raise ConfigError("the clients' last models were not stored; run with 'average' in evaluation.what.")
    clients = (last.models if split and last is not None else snapshot.store).clients
    if not clients:
        raise ConfigError("no client has participated yet, so there are no client models.")

    def full_vector(client: int, initial: Tensor, at: slice, name: str) -> Tensor:
        shared = torch.zeros(0) if last is None or not split else last.get(client)[at]
        if len(shared) == len(initial):
            return shared.to(initial)
        private = (snapshot.store.get(client) or {}).get("personal", {}).get(name, initial[len(shared) :])
        return torch.cat([shared.to(initial), private.to(initial)])

    models: Sequence[Tensor] = [full_vector(c, plan.theta0, slice(split), "private") for c in clients]
    buffers: Sequence[Tensor] = [
        full_vector(c, plan.buffers0, slice(split, split + shared_buffers), "buffers") for c in clients
    ]
    return np.array(clients), torch.stack(models), torch.stack(buffers)
