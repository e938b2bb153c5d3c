"""The models of a run as they are deployed: the server's, each client's, and those of clients that join later."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.compute import computes
from fedloom.core import meta
from fedloom.core.client import State
from fedloom.core.context import Batch
from fedloom.core.errors import ClientError, ConfigError, DataError, nearest
from fedloom.core.federation import Arrays, Index, Population, Split
from fedloom.core.parts import Paired, Submodels
from fedloom.core.plan import ClientPlan
from fedloom.core.round import InitialStates
from fedloom.core.slots import label
from fedloom.core.targets import NUMBERS, TRUTHS
from fedloom.data.sources.arrays import numbers
from fedloom.data.sources.images import to_images
from fedloom.experiment.evaluate import Evaluator
from fedloom.experiment.export import SAMPLES, export
from fedloom.experiment.interpolation_eval import deployed_lambda, fill_interpolated
from fedloom.experiment.loaded import LoadedModel, Measurement
from fedloom.experiment.runtime import one_thread
from fedloom.experiment.snapshot import Snapshot
from fedloom.experiment.store import MemoryStore
from fedloom.metrics import Predictions

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class DeployedModel:
    """A trained model with the conventions of its data: what it takes, and how its outputs are read and measured.

    Attributes:
        module: an independent PyTorch module in evaluation mode, from inputs [N, ...] to outputs [N, ...].
        arrays: training data whose shape, type, classes and normalisation the inputs must have.
        measurement: how outputs are read and measured: metrics, loss and batch size.
        lam: λ of an interpolated model (1 - λ)w + λv; None otherwise.
    """

    module: nn.Module
    arrays: Arrays = field(repr=False)
    measurement: Measurement = field(repr=False)
    lam: float | None = None

    def outputs(self, x: Any) -> Tensor:
        """The module's outputs on inputs [N, ...]: logits [N, C], or predicted numbers of a regression.

        Raises:
            DataError: if the inputs have another shape or type than the run's data, or are not finite.
        """
        pieces = self.inputs(x).split(self.measurement.settings.batch_size)
        with torch.no_grad():
            return torch.cat([self.module(piece.to(self.device)).cpu() for piece in pieces])

    def predict(self, x: Any) -> Tensor:
        """Predictions in the form of the run's targets: class numbers, truth values 0 and 1, or numbers.

        Args:
            x: inputs [N, ...] as the run's data hold them, as an array, a tensor or a table. Images in 8-bit pixels,
                also [N, H, W] or [N, H, W, C], are scaled and normalised as the run's images were.

        Returns:
            Class numbers, int64 [N], or [N, T] for sequences labelled at every position; truth values, int64, or
            numbers, shaped like the targets.

        Raises:
            DataError: as ``outputs``.
        """
        out, kind = self.outputs(x), self.measurement.targets
        if kind not in (TRUTHS, NUMBERS):
            return out.argmax(-1)
        out = out.reshape(len(out), *self.arrays.y.shape[1:])
        return (out > 0).to(torch.int64) if kind == TRUTHS else out

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """Loss and the run's metrics on inputs [N, ...] with targets [N].

        Raises:
            DataError: as ``outputs``, or if the targets do not fit the run's.
        """
        given = self.labelled(x, y)
        settings, found = self.measurement.settings, []
        size = settings.batch_size
        for x, y in zip(given.x.split(size), given.y.split(size), strict=True):
            with torch.no_grad():
                out = self.module(x.to(self.device))
            found.append(self.measurement.predictions(out, y.to(self.device)))
        joined = Predictions.joined(found)
        values = {name: joined.value(name) for name in settings.metrics}
        found = {self.measurement.loss_name: joined.value("loss")}
        return found | {name: value for name, value in values.items() if not np.isnan(value)}

    def export(self, path: Path | str, format: str = "safetensors") -> Path:
        """Write the model to a new file, as safetensors, torch-export or onnx; see ``fedloom.experiment.export``.

        Raises:
            ConfigError: if the file exists or cannot be written, or the model cannot be written in that format.
        """
        sample = self.arrays.x[:1].repeat_interleave(SAMPLES, 0)
        return export(copy.deepcopy(self.module), sample, path, format)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))

    def inputs(self, x: Any) -> Tensor:
        """Inputs [N, ...] in the type of the run's data; see ``predict``."""
        wanted, shape = self.arrays.x.dtype, tuple(self.arrays.x.shape[1:])
        x = as_tensor("x", x)
        pixels = x.dtype == torch.uint8 and wanted.is_floating_point and len(shape) == 3
        if pixels:
            last = x.ndim == 3 or (x.shape[1:] != shape and x.shape[-1] in (1, 3, 4))  # the channels, if there are any
            x = to_images(x.cpu().numpy()).to(x.device, wanted) if last else x.to(wanted) / 255
        if tuple(x.shape[1:]) != shape or not len(x):
            one = " (one sample needs a first axis of length 1)" if tuple(x.shape) == shape else ""
            raise DataError(
                f"the inputs have shape {list(x.shape)}, but this model takes [N, {', '.join(map(str, shape))}]{one}."
            )
        if not wanted.is_floating_point and x.is_floating_point():
            raise DataError("the inputs are fractions, but this model takes whole numbers, such as tokens.")
        if pixels:
            mean, std = (
                torch.tensor(values or default, dtype=wanted, device=x.device).reshape(-1, 1, 1)
                for values, default in ((self.arrays.mean, (0.0,)), (self.arrays.std, (1.0,)))
            )
            return (x - mean) / std
        x = x.to(wanted)
        if x.is_floating_point() and not bool(torch.isfinite(x.sum())):
            raise DataError("some inputs are NaN or infinite.")
        return x

    def labelled(self, x: Any, y: Any) -> Arrays:
        """Inputs and targets as arrays like the run's."""
        like, x, y = self.arrays.y, self.inputs(x), as_tensor("y", y)
        if y.ndim == like.ndim + 1 and y.shape[-1] == 1:
            y = y.squeeze(-1)
        if tuple(y.shape) != (len(x), *like.shape[1:]):
            raise DataError(f"the targets have shape {list(y.shape)}, not {[len(x), *like.shape[1:]]}.")
        if not like.is_floating_point() and y.is_floating_point() and not torch.equal(y, y.round()):
            raise DataError("the targets are fractions, but this run's are numbers of classes.")
        return replace(self.arrays, x=x, y=y.to(like.dtype))


class Adapted(nn.Module):
    """A model that predicts with a client's samples beside its parameters, such as class means of their features."""

    def __init__(self, predict: Any) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, ...] of inputs [N, ...]."""
        return self.predict(x)


class RunRecords:
    """What every run leaves: its records and its summary.

    Args:
        history: one record per round.
        summary: the content of ``summary.json``; empty if the run has not ended.
        path: the run directory, if there is one.
    """

    def __init__(
        self, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path | None = None
    ) -> None:
        self.records, self.summary, self.path = history, summary, path

    @property
    def history(self) -> DataFrame:
        """One row per round, one column per key of the records; NaN where a round has no such number."""
        from pandas import DataFrame

        return DataFrame(list(self.records))


class TrainedRun(RunRecords):
    """What a run trained, ready for use: ``fedloom.load`` makes it of a run directory.

    >>> import fedloom as fl
    >>> federation = fl.data.federate("digits", "dirichlet", clients=4)
    >>> trained = fl.run("fedper", federation, "mlp", rounds=2).trained
    >>> mine, test = trained.client(3), federation.held_out.client(3)
    >>> mine.predict(test.x).shape == test.y.shape
    True
    >>> sorted(mine.evaluate(test.x, test.y))
    ['accuracy', 'loss']

    Args:
        evaluator: the run's evaluator, whose models these are.
        snapshot: all final state.
        history: one record per round.
        summary: the content of ``summary.json``; empty if the run has not ended.
        path: the run directory, if there is one.
        apart: whether clients kept their data and models to themselves, as in a deployment.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        snapshot: Snapshot,
        history: Sequence[Mapping[str, Any]],
        summary: Mapping[str, Any],
        path: Path | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__(history, summary, path)
        self.evaluator, self.snapshot, self.apart = evaluator, snapshot, apart
        self.federation, self.plan = evaluator.federation, evaluator.plan

    def __repr__(self) -> str:
        rounds = self.snapshot.server.round
        return f"<TrainedRun of {self.plan.method.name!r}: {len(self.federation)} clients, {rounds} rounds>"

    @cached_property
    def server(self) -> DeployedModel:
        """The server's model.

        Raises:
            ConfigError: if some of its parameters are private, so that only clients have a whole model.
        """
        self._refuse_without_models()
        if self.plan.has_private:
            raise ConfigError(
                f"with personal {label(self.plan.method.personal)!r} clients keep parameters to themselves, so that "
                "the server has no whole model; use that of a client, client(0) or --client 0, or of a new one, "
                "adapt(x, y)."
            )
        server = self.snapshot.server
        return self._model(self.plan, server.theta, server.buffers)

    def client(self, client: int | str) -> DeployedModel:
        """The model that a client deploys, with the same bits as in the run's own evaluation of that client.

        That is the server's model, with the client's private parameters if the method keeps some; (1 - λ)w + λv at the
        client's λ if it trains two models; its level's network if clients have networks of different size; and adapted
        to its training samples if the method adapts models.

        Args:
            client: its number, from 0, or its name if the data have names.

        Raises:
            ConfigError: if there is no such client, clients kept their models to themselves, or no model outlives a
                round.
        """
        self._refuse_without_models()
        if self.apart and (self.plan.private_size or not self.plan.method.adaptation.is_identity):
            raise ConfigError("the clients of this run kept their models to themselves; the server has only its own.")
        number = self._number(client)
        plan, snapshot = self.plan, self.snapshot
        support = None
        if not plan.method.adaptation.is_identity:
            own = self.federation.train.client(number)
            support = Batch(own.x, own.y)
        at = self._lambdas[number] if plan.is_paired else None
        level = int(self.evaluator.level_of(np.array([number]), snapshot.server)[0])
        return self._deployed(plan, snapshot.store.get(number), at, level, support)

    def adapt(self, x: Any, y: Any, rounds: int = 10) -> DeployedModel:
        """The model that a new client with samples x [n, ...] and targets y [n] deploys; the run is not changed.

        The client receives the final server model. If the method keeps parameters at clients, it trains its own ones as
        in ``rounds`` rounds of the method, while the server stays as it is and receives nothing. If the method adapts
        models, the model is then adapted to the samples. A client that would choose λ on validation samples takes 0.5.

        Raises:
            ConfigError: if ``rounds`` is below 1, or no model outlives a round.
            DataError: if the samples do not fit the run's data.
            ClientError: if training fails or diverges.
        """
        self._refuse_without_models()
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}, but it must be a whole number of at least 1.")
        server = self.snapshot.server
        data = DeployedModel(self.plan.model, self.federation.train.arrays, self.evaluator.measurement).labelled(x, y)
        data = replace(data, x=data.x.to(server.theta.device), y=data.y.to(server.theta.device))
        plan, number = _joined(self.plan, data), self.plan.population.clients
        store = MemoryStore()
        if plan.private_size:
            compute, states = computes.make("live")(plan), InitialStates(plan, server, store)
            with one_thread():
                for ahead in range(rounds):
                    down = replace(server, round=server.round + ahead).broadcast(plan)
                    (result,) = compute.work(replace(down, invited=(number,)), [number], [states(number)])
                    if (failure := result.failure) is not None:
                        raise ClientError(f"the new client cannot train: {failure.reason}.", failure.trace)
                    store.update({number: result.state})
        state, at = store.get(number), None
        if isinstance(plan.method.personal, Paired):
            private = (state or {}).get("personal", {}).get("private")
            fixed = 0.0 if private is None else plan.method.personal.deployed(private[plan.layout.size :])
            at = 0.5 if fixed is None else fixed
        support = None if plan.method.adaptation.is_identity else Batch(data.x, data.y)
        levels = range(len(plan.levels)) if plan.chooses else [int(plan.level[number])]
        models = [self._deployed(plan, state, at, level, support) for level in levels]
        loss = self.evaluator.measurement.loss_name
        return models[0] if len(models) == 1 else min(models, key=lambda one: one.evaluate(x, y)[loss])

    def _deployed(
        self, plan: ClientPlan, state: State | None, at: float | None, level: int, support: Batch | None
    ) -> DeployedModel:
        """The model of a client with this state, λ, level and samples to adapt to."""
        server = self.snapshot.server
        if isinstance(plan.method.personal, Submodels):
            one = plan.levels[level]
            return self._model(one, one.own(server.theta), server.buffers)
        loaded = LoadedModel(plan, self.evaluator.settings)
        loaded.load(server.theta, server.buffers, None if at is not None else state)
        theta, buffers = loaded.live.theta, loaded.live.buffers
        if at is not None:
            fill_interpolated(state, server.theta, at, theta)
        if support is None:
            return self._model(plan, theta, buffers, at)
        with torch.no_grad(), one_thread():
            fitted = meta.fitted(plan, loaded.net, theta, buffers, support)
            if fitted is not None:
                return self._model(plan, fitted, buffers)
            predict = meta.deployed(plan, loaded.net, theta, buffers, support)
        return DeployedModel(Adapted(predict).eval(), self.federation.train.arrays, self.evaluator.measurement)

    def _model(self, plan: ClientPlan, theta: Tensor, buffers: Tensor, lam: float | None = None) -> DeployedModel:
        """An independent module with these parameters [P] and buffers, laid out in memory as in the evaluation."""
        module = copy.deepcopy(plan.model).to(theta.device)
        module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        plan.layout.write(module, theta, buffers)
        return DeployedModel(module.eval(), self.federation.train.arrays, self.evaluator.measurement, lam)

    @cached_property
    def _lambdas(self) -> np.ndarray:
        """λ of every client's deployed model [K]; those of tested clients are chosen together, as in the evaluation."""
        federation, found = self.federation, np.zeros(len(self.federation))
        tested = federation.held_out.index.sizes > 0
        for clients in (np.flatnonzero(tested), np.flatnonzero(~tested)):
            if len(clients):
                server, store = self.snapshot.server, self.snapshot.store
                found[clients], _ = deployed_lambda(self.evaluator, federation, server, store, clients)
        return found

    def _number(self, client: int | str) -> int:
        names, clients = self.federation.names, len(self.federation)
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, str) and names:
            raise ConfigError(f"there is no client {client!r}; {nearest(client, names)}")
        if isinstance(client, bool) or not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"there is no client {client!r}; clients have the numbers 0 to {clients - 1}.")
        return int(client)

    def _refuse_without_models(self) -> None:
        if self.plan.has_private and not self.plan.method.personal.kept:
            raise ConfigError(
                f"with personal {label(self.plan.method.personal)!r} no model outlives a round; a run of fedloom "
                "synthesize leaves data, which are read as data=generated:DIR/synthetic.npz."
            )
        if not self.plan.method.predicts:
            raise ConfigError(
                f"method {self.plan.method.name!r} trains no predictor, but makes synthetic data; read them from "
                "its run directory, as data=generated:DIR/synthetic.npz."
            )


def _joined(plan: ClientPlan, new: Arrays) -> ClientPlan:
    """The plan of a federation in which a client with these samples comes last; it holds no others' rows."""
    before = plan.population
    sizes = np.append(before.sizes, len(new))
    index = Index.of([*([[]] * before.clients), np.arange(len(new))])
    whole = Population(before.clients + 1, sizes, float(sizes.mean()))
    return replace(plan, data=Split(new, index), validation=None, whole=whole)


def as_tensor(what: str, given: Any) -> Tensor:
    """Numbers of any kind of array or table as a tensor.

    >>> as_tensor("x", [[1, 2]])
    tensor([[1, 2]])

    Raises:
        DataError: if they are no numbers.
    """
    try:
        array = given if isinstance(given, Tensor) else np.asarray(given)
    except ValueError as error:
        raise DataError(f"{what} has rows of different lengths.") from error
    return numbers(array, what)
