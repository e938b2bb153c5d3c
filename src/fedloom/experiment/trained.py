"""The models of a run as they are deployed: the server's, each client's, and those of clients that join later.

A model has its inputs, the interpretation and measurement of its outputs, and its export (safetensors, PyTorch's
exported programs, ONNX).
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.applications import shown
from fedloom.base.checks import one_of
from fedloom.base.determinism import exact_gpu
from fedloom.base.errors import ClientError, ConfigError, DataError, first_line, nearest, of_extra
from fedloom.base.files import writing
from fedloom.compute import computes
from fedloom.core.context import Batch
from fedloom.core.federation import Arrays, Federation, Index, Population, Split
from fedloom.core.parts import Use
from fedloom.core.samples import Samples, batch_of, moved
from fedloom.core.slots import label
from fedloom.core.targets import CLASSES, NUMBERS, STRUCTURES, TRUTHS
from fedloom.experiment.atomic import as_file, write_whole
from fedloom.experiment.conventions import compare, conventions, known_tokens, table_of
from fedloom.experiment.evaluation import Evaluation, Measurement
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.passes import LoadedModel
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import placed
from fedloom.experiment.snapshot import Snapshot
from fedloom.experiment.store import StateStore
from fedloom.metrics import Predictions
from fedloom.rounds import meta
from fedloom.rounds.cohort import InitialStates
from fedloom.rounds.exchange import State, own_values
from fedloom.rounds.plan import ClientPlan

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class DeployedModel:
    """A trained model with the conventions of its data: its inputs, and how outputs are interpreted and measured.

    Attributes:
        module: an independent PyTorch module in evaluation mode, from inputs [N, ...] to outputs [N, ...].
        arrays: training data whose shape, type, classes and normalisation the inputs must have.
        measurement: how outputs are read and measured: metrics, loss and batch size.
        lam: λ of an interpolated model (1 - λ)w + λv; None otherwise.
        table: how the run's data were made, if from a table; see ``conventions.table_of``.
    """

    module: nn.Module
    arrays: Arrays = field(repr=False)
    measurement: Measurement = field(repr=False)
    lam: float | None = None
    table: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names by their number, if the run's data have some: ``names[int(model.predict(x)[0])]``."""
        return () if self.measurement.targets == NUMBERS else tuple(self.arrays.names)

    def outputs(self, x: Any) -> Any:
        """The module's outputs on inputs [N, ...]: logits [N, C], or predicted numbers of a regression.

        Of a run whose data were put together by ``collate``, ``x`` is a sequence of samples like those; if their
        targets are structures, the outputs are a list with that for each sample alone.

        Raises:
            DataError: if the inputs have another shape or type than the run's data, are not finite, or are tokens that
                the model does not know.
        """
        x = self.inputs(x)
        pieces = (batch_of(x, rows) for rows in torch.arange(len(x)).split(self.measurement.batch_size))
        outputs = [moved(self._outputs(piece), "cpu") for piece in pieces]
        return outputs if self.arrays.has_structures else torch.cat(outputs)

    def _outputs(self, x: Any) -> Any:
        """The module's outputs on inputs in the type of the run's data, on the module's device."""
        with torch.no_grad(), exact_gpu(), self.known(x):  # as the run's own evaluation
            return self.module(moved(x, self.device))

    def known(self, x: Any) -> AbstractContextManager[None]:
        """A block that applies the module to these inputs; it raises ``DataError`` if they are unknown tokens."""
        if isinstance(self.arrays.x, Samples):
            return contextlib.nullcontext()
        basis = self.module.basis if isinstance(self.module, Adapted) else self.module
        return known_tokens(basis, self.device.type == "cpu", x)

    def predict(self, x: Any) -> Tensor:
        """Predictions in the form of the run's targets: class numbers, truth values 0 and 1, or numbers.

        Args:
            x: inputs [N, ...] as the run's data hold them, as an array, a tensor or a table. If the run's data were a
                table, columns of a table are found by their names, with its categories, and standardised as they were.
                Texts, in their column or as a list, become tokens as the run's did. Images in 8-bit pixels, also
                [N, H, W] or [N, H, W, C], are scaled and normalised as the run's images were.

        Returns:
            Class numbers, int64 [N], or [N, T] for sequences labelled at every position; truth values, int64, or
            numbers, shaped like the targets.

        Raises:
            DataError: as ``outputs``.
        """
        out, kind = self.outputs(x), self.measurement.targets
        if kind == STRUCTURES:
            return out
        if kind not in (TRUTHS, NUMBERS):
            return out.argmax(-1)
        out = out.reshape(len(out), *self.arrays.y.shape[1:])
        return (out > 0).to(torch.int64) if kind == TRUTHS else out

    def evaluate(self, x: Any, y: Any = None) -> dict[str, float]:
        """Loss and the run's metrics on inputs [N, ...] with targets [N], as numbers or names of classes.

        Samples whose targets ``collate`` returns, too, need no ``y``.
        """
        arrays, values = self.labelled(x, y), []
        for rows in torch.arange(len(arrays)).split(self.measurement.batch_size):
            x, y = arrays.batch(rows)
            values.append(self.measurement.predictions(self._outputs(x), moved(y, self.device)))
        joined = Predictions.joined(values)
        values = {self.measurement.loss_name: joined.value("loss")}
        return values | {name: joined.value(name) for name in self.measurement.metrics}

    def export(self, path: Path | str, format: str = "safetensors") -> Path:
        """Write the model to a new file, as safetensors, torch-export or onnx; see ``fedloom.experiment.trained``.

        Raises:
            ConfigError: if the file exists or cannot be written, or the model cannot be written in that format.
        """
        if isinstance(self.arrays.x, Samples):
            if format != "safetensors":
                raise ConfigError(f"format={format} holds a computation on one tensor; choose safetensors.")
            return export(copy.deepcopy(self.module), torch.empty(0), path)
        sample = self.arrays.x[:1].repeat_interleave(SAMPLES, 0)
        return export(copy.deepcopy(self.module), sample, path, format)

    def read(self, path: Path | str) -> dict[str, Any]:
        """The inputs ``x`` of a file as ``predict`` takes them, and its targets ``y``, if it has them.

        Args:
            path: an npz file with ``x`` and perhaps ``y``, an npy file of inputs, or a CSV or parquet table, if the
                run's data were one. Columns of arrays are scaled as the run's were.

        Raises:
            DataError: if it cannot be read, or is a table and the run's data were not.
        """
        if isinstance(self.arrays.x, Samples):
            raise DataError(
                "files hold rows of one tensor, but this run's samples are put together; predict in Python."
            )
        from fedloom.data.like import in_units, read_like

        return in_units(read_like(Path(path), self.table, self.names), self.arrays, self.table)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        if isinstance(self.module, Adapted):
            return self.module.device
        return next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))

    def inputs(self, x: Any) -> Any:
        """Inputs [N, ...] in the type of the run's data; see ``predict``. A GPU gets no token that it does not know."""
        from fedloom.data.like import inputs_like  # training reads no further inputs

        if isinstance(self.arrays.x, Samples):
            return replace(self.arrays.x, items=x)
        x = inputs_like(self.arrays, self.table, x)
        with self.known(x):
            return x

    def labelled(self, x: Any, y: Any) -> Arrays:
        """Inputs and targets as arrays like the run's."""
        from fedloom.data.like import labelled_like

        if self.arrays.has_structures:
            return replace(self.arrays, x=self.inputs(x), y=replace(self.arrays.y, items=x))
        return labelled_like(self.arrays, self.inputs(x), y)


class Adapted(nn.Module):
    """A model that predicts with a client's samples as well as its parameters, such as class means of features.

    Args:
        predict: outputs [N, ...] from inputs [N, ...] on ``device``.
        basis: the network that it applies to them; it is no part of the module.
        device: the device of the parameters and samples.
    """

    basis: nn.Module

    def __init__(self, predict: Any, basis: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.predict, self.device = predict, device
        self.__dict__["basis"] = basis  # unregistered

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, ...] of inputs [N, ...]."""
        return self.predict(x)


FORMATS = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""The formats, with their file extensions."""
SAMPLES = 2  # in the example with which a module is traced; one could be taken for a constant


def export(module: nn.Module, sample: Tensor, path: Path | str, format: str = "safetensors") -> Path:
    """Write a module to a file, which must not exist yet.

    ``safetensors`` holds the tensors under their names, for the same module elsewhere. ``torch-export`` and ``onnx``
    hold the whole computation, for any number of samples.

    Args:
        module: from inputs [N, ...] to outputs [N, ...], in evaluation mode.
        sample: at least two inputs [N, ...], of which the shape and type count: files hold what a module is traced
            with, which must be nobody's data.
        path: the file; its extension is up to the caller, but may not be that of another format.
        format: one of ``FORMATS``.
    """
    path = Path(path)
    one_of("unknown format", format, FORMATS)
    refuse_other(path, format)
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another file.")
    module, sample = module.to("cpu"), torch.zeros_like(sample[:SAMPLES], device="cpu")
    if format == "safetensors":
        if not module.state_dict():
            raise ConfigError(
                "this model predicts with the client's samples and its parameters, which safetensors cannot hold; "
                "choose torch-export or onnx."
            )
        blob = as_file(module.state_dict())
    else:
        blob = _program(module, sample, format)
    with writing(path, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, blob)
    return path


def refuse_other(path: Path, format: str) -> None:
    """Raise ``ConfigError`` if the file has the extension of a format other than the one that it would have.

    >>> refuse_other(Path("model.onnx"), "safetensors")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: model.onnx would hold safetensors, not onnx; name it model.safetensors.
    """
    named = [name for name, extension in FORMATS.items() if path.suffix.lower() == extension]
    if named and format not in named:
        raise ConfigError(f"{path} would hold {format}, not {named[0]}; name it {path.with_suffix(FORMATS[format])}.")


def _program(module: nn.Module, sample: Tensor, format: str) -> bytes:
    """The whole computation of a module in a format."""
    for package in ("onnx", "onnxscript") if format == "onnx" else ():
        of_extra("onnx", package, "format onnx")
    with _quiet(), torch.no_grad():
        traced, buffer = _traced(module, sample), io.BytesIO()
        if format == "torch-export":
            torch.export.save(traced, buffer)
            return buffer.getvalue()
        try:
            program: Any = torch.onnx.export(traced, dynamo=True, verbose=False, input_names=["x"], output_names=["y"])
        except Exception as error:
            raise _refused(error, "onnx") from error
    return program.model_proto.SerializeToString()


def _traced(module: nn.Module, sample: Tensor) -> Any:
    """The module as a program that takes any number of samples."""
    count = torch.export.Dim.DYNAMIC  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.enable_grad():  # without, adapted models split large inputs, which no program of any size could
            program = torch.export.export(module, (sample,), dynamic_shapes=({0: count},))
    except Exception as error:
        raise _refused(error, "torch-export") from error
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _refused(error: Exception, format: str) -> ConfigError:
    return ConfigError(f"this model cannot be written as {format}: {first_line(error, 200)}.")


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress the exporters' notes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class RunRecords:
    """The records and the summary that every run leaves.

    Args:
        history: one record per round.
        summary: the content of ``summary.json``; empty if the run has not ended.
        path: the run directory, if there is one.
    """

    def __init__(
        self, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path | None = None
    ) -> None:
        self.records, self.summary, self.path = history, summary, path

    def _repr_html_(self) -> str | None:
        return shown(self)

    @property
    def history(self) -> DataFrame:
        """One row per round, one column per key of the records; NaN where a round has no such number."""
        from pandas import DataFrame

        return DataFrame(list(self.records))


class TrainedRun(RunRecords):
    """The models that a run has trained, ready for use; ``fedloom.load`` reads them from a run directory.

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
            others = "of a node, fedloom deploy predict there" if self.apart else "of a client, client(0) or --client 0"
            raise ConfigError(
                f"with personal {label(self.plan.method.personal)!r} clients keep parameters to themselves, so that "
                f"the server has no whole model; use that {others}, or of a new one, adapt(x, y)."
            )
        self._refuse_without_mean("client(0) or --client 0")
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
            use = f"call adapt(x, y) for a new client{'' if self.plan.has_private else ', and server is its own'}"
            raise ConfigError(
                "a deployment's data and its clients' own models stay with the nodes, where fedloom deploy predict "
                f"uses them; {use}."
            )
        number = self._number(client)
        plan, snapshot = self.plan, self.snapshot
        support = None
        if not plan.method.adaptation.is_identity:
            own = self.federation.train.client(number)
            support = Batch(own.x, own.y)
        model = self._deployed(plan, snapshot.store.get(number), self._uses[number], support)
        return replace(model, arrays=self.federation.train.named(number))

    def adapt(self, x: Any, y: Any, rounds: int = 10) -> DeployedModel:
        """The model that a new client with samples x [n, ...] and targets y [n] deploys; the run is not changed.

        The client receives the final server model. If the method keeps parameters at clients, it trains its own as in
        ``rounds`` rounds of the method, while the server is unchanged and receives nothing. If the method adapts
        models, the model is then adapted to the samples. A client that would choose λ on validation samples takes 0.5.
        Of several models it receives the mean, or the one with the lowest loss on its samples where clients choose.

        Raises:
            ConfigError: if ``rounds`` is below 1, or no model outlives a round.
            DataError: if the samples do not fit the run's data.
            ClientError: if training fails or diverges.
        """
        self._refuse_without_models()
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}, but it must be a whole number of at least 1.")
        server = self.snapshot.server
        data = self._as_deployed(self.plan.model).labelled(x, y)
        with self._as_deployed(self.plan.model).known(data.x):  # before the method trains on them
            data = replace(data, x=data.x.to(server.theta.device), y=data.y.to(server.theta.device))
        plan, number = _joined(self.plan, data), self.plan.population.clients
        store = StateStore()
        if plan.private_size:
            mine = plan.levels[plan.level[number]]
            compute, states = computes.make("live")(mine), InitialStates(plan, server.broadcast(plan).theta, store)
            with reproducible():
                for ahead in range(rounds):
                    down = replace(server, round=server.round + ahead).broadcast(plan).at(mine)
                    down = replace(down, invited=(number,))
                    (result,) = compute.work(down, [number], [states(number)])
                    if (failure := result.failure) is not None:
                        raise ClientError(f"the new client cannot train: {failure.reason}.", failure.trace)
                    store.put({number: result.state}, ahead + 1)
        return self.with_state(number, store.get(number), x, y)

    def with_state(self, number: int, state: State | None, x: Any, y: Any) -> DeployedModel:
        """The model of the client with this number and state; ``adapt`` says how it is adapted to its samples."""
        plan, data = self.plan, self._as_deployed(self.plan.model).labelled(x, y)
        device = self.snapshot.server.theta.device
        support = None if plan.method.adaptation.is_identity else Batch(data.x.to(device), data.y.to(device))
        uses = plan.method.personal.uses(number, lambda: own_values(state), 0)
        if plan.method.topology.chooses:
            uses = tuple(use._replace(model=model) for use in uses for model in range(plan.models))
        else:
            self._refuse_without_mean("client(0)")
        models = [self._deployed(plan, state, use, support) for use in uses]
        loss = self.evaluator.measurement.loss_name
        return models[0] if len(models) == 1 else min(models, key=lambda model: model.evaluate(x, y)[loss])

    def evaluate(self, federation: Federation | None = None, evaluation: Evaluation | None = None) -> dict[str, Any]:
        """The records of an evaluation of the run's models, on its own federation or on another; nothing is trained.

        Args:
            federation: other clients, which then use the server's model, adapted to their training samples if the
                method adapts models; by default the run's own with the models that they deploy.
            evaluation: what is measured; by default as in the run. ``average``, ``cohort`` and ``received`` are left
                out.

        Raises:
            ConfigError: if clients of the method keep parameters, which those of another federation do not have; if
                its classes, columns or tokens are others; or if its samples cannot be measured.
        """
        self._refuse_without_models()
        plan, store, here = self.plan, self.snapshot.store, self.federation
        if self.apart and federation is None:
            raise ConfigError("a deployment's data stay with the nodes; give the federation to evaluate on.")
        if federation is not None:
            if plan.private_size or self.snapshot.server.models is not None:
                part = plan.method.topology if self.snapshot.server.models is not None else plan.method.personal
                raise ConfigError(
                    f"with {label(part)!r} clients have their own models; for a client of "
                    "another federation call adapt(x, y)."
                )
            ours, theirs = (conventions(each.train.arrays, each.provenance) for each in (federation, self.federation))
            compare(theirs, ours, "the run's model")
            here = placed(federation, plan.layout.dtype, plan.device)
            plan, store = replace(plan, data=here.train, validation=None, whole=None), StateStore()
            known, new = (
                f"of shape {list(each.train.arrays.x.shape[1:])} in {each.classes} classes"
                for each in (self.federation, here)
            )
            if known != new:
                raise ConfigError(f"the run's model takes samples {known}, but these are {new}.")
        settings = self.evaluator.settings if evaluation is None else evaluation
        fitted = settings.fitted(plan.targets or CLASSES, len(here.test) > 0)
        what = tuple(name for name in fitted.what if name not in ("average", "cohort", "received"))
        evaluator = Evaluator(plan, here, replace(fitted, what=what, server_average=0.0))
        with reproducible():
            return evaluator.measure(self.snapshot.server, store, {})[0]

    def _deployed(self, plan: ClientPlan, state: State | None, use: Use, support: Batch | None) -> DeployedModel:
        """The model that a client with this state uses, adapted to ``support`` if there are any samples."""
        server, plan = self.snapshot.server.model(use.model), plan.levels[use.level]
        loaded = LoadedModel(plan, self.evaluator.settings)
        loaded.load(plan.own(server.theta), plan.own_buffers(server.buffers), state, use)
        theta, buffers = loaded.live.theta, loaded.live.buffers
        if support is None:
            return self._model(plan, theta, buffers, use.lam)
        with torch.no_grad(), reproducible():
            fitted = meta.fitted(plan, loaded.net, theta, buffers, support)
            if fitted is not None:
                return self._model(plan, fitted, buffers)
            predict = meta.deployed(plan, loaded.net, theta, buffers, support)
        return self._as_deployed(Adapted(predict, plan.model, theta.device).eval())

    def _model(self, plan: ClientPlan, theta: Tensor, buffers: Tensor, lam: float | None = None) -> DeployedModel:
        """An independent module with these parameters [P] and buffers, laid out in memory as in the evaluation."""
        module = copy.deepcopy(plan.model).to(theta.device)
        module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        plan.layout.write(module, theta, buffers)
        return self._as_deployed(module.eval(), lam)

    def _as_deployed(self, module: nn.Module, lam: float | None = None) -> DeployedModel:
        """A module with the conventions of the run's data."""
        federation = self.federation
        table = table_of(federation.provenance)
        return DeployedModel(module, federation.train.arrays, self.evaluator.measurement, lam, table)

    @cached_property
    def _uses(self) -> list[Use]:
        """The model that every client uses [K]; those with test samples choose together, as in the evaluation."""
        server, store, uses = self.snapshot.server, self.snapshot.store, [Use()] * len(self.federation)
        tested = self.federation.held_out.index.sizes > 0
        for clients in (np.flatnonzero(tested), np.flatnonzero(~tested)):
            with exact_gpu():
                for client, use in zip(clients, self.evaluator.chosen(server, store, clients), strict=True):
                    uses[client] = use
        return uses

    def _number(self, client: int | str) -> int:
        names, clients = self.federation.names, len(self.federation)
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, str) and names:
            raise ConfigError(f"there is no client {client!r}; {nearest(client, names)}")
        if isinstance(client, bool) or not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"there is no client {client!r}; clients have the numbers 0 to {clients - 1}.")
        return int(client)

    def _refuse_without_mean(self, instead: str) -> None:
        topology = self.plan.method.topology
        if self.snapshot.server.models is not None and not topology.has_mean:
            raise ConfigError(
                f"with topology {label(topology)!r} clients have different models, whose mean is none of them; use "
                f"that of a client, {instead}."
            )

    def _refuse_without_models(self) -> None:
        if self.plan.has_private and not self.plan.method.keeps_private:
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
