"""A node: it holds one client's data and state, and answers the orders of a server.

A node neither receives nor runs code: an order names settings, and only the answer leaves the node. It may be killed at
any time; restarted, it continues where it was.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import CheckpointError, FedLoomError, printable
from fedloom.base.files import writing
from fedloom.compute import computes
from fedloom.compute.live import Live
from fedloom.core.targets import CLASSES
from fedloom.engines import engines
from fedloom.experiment.atomic import Lock, append, write_whole
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.store import client_forms, flat
from fedloom.rounds.engine import Compute
from fedloom.rounds.exchange import Broadcast, Result, State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server, first_state
from fedloom_apps.deploy.agreement import Agreement
from fedloom_apps.deploy.assignment import Assignment, Forms, Workspace, forms, prepare, prepare_without_data
from fedloom_apps.deploy.budget import Budget, Ledger, Quota
from fedloom_apps.deploy.data import NodeData, read
from fedloom_apps.deploy.messages import (
    EVALUATE,
    JOIN,
    LOSSES,
    MODERATE,
    VALIDATION_LOSSES,
    WORK,
    Code,
    Order,
    Refusal,
    code_of,
    is_moderate,
    read_broadcast,
)
from fedloom_apps.deploy.versions import Versions
from fedloom_apps.deploy.wire import LIMIT, WireError, pack

FILE = "node.log"
LONGEST = 1 << 24  # bytes of a log; the one before is kept beside it
EVENT = 10_000  # characters of an event
BAD = ("refused: ", "failed: ")


class Log:
    """Writes events to a file, and passes them on."""

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda sentence: None) -> None:
        self.path, self.tell = path, tell

    def __call__(self, event: str) -> None:
        """Note an event; what a server chose in it cannot control a terminal, or look like another event."""
        lines = [printable(line) for line in event[:EVENT].splitlines()]
        event = "\n    ".join(lines)
        with suppress(OSError):  # a full disk: no answer depends on the log
            if self.path.exists() and self.path.stat().st_size > LONGEST:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            append(self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event}\n")
        with suppress(OSError):
            self.tell(event)


def reasons(path: Path) -> list[str]:
    """The last five refusals and failures in a log, the newest last."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path} is not the log of a node ({error.strerror}).") from error
    events: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and events:
            events[-1] += f"\n{line}"
        else:
            events.append(line)
    return [event for event in events if event[20:].startswith(BAD)][-5:]


DEFAULT = Quota()
STOPPED = "stopped.txt"  # why a node with a budget answers no more
RUN = 32  # longest run identifier, which names a folder


class Node:
    """One client of deployments.

    Args:
        data: the location of its samples, see ``fedloom_apps.deploy.data.read``.
        state: folder of its client states, accessible to the node's owner alone.
        tell: called with a message about every event, which its own log has as well.
        limit: largest message in bytes.
        budget: the privacy that all runs together may spend; with one, the node measures no losses and no metrics, and
            trains only with its own noise.
        quota: what servers may take.
        log: the file of its log; by default ``node.log`` in ``state``.

    Raises:
        CheckpointError: if another process uses the folder, or the record of the spent privacy cannot be read.
    """

    def __init__(
        self,
        data: str,
        state: Path,
        tell: Callable[[str], None] = lambda sentence: None,
        limit: int = LIMIT,
        budget: Budget | None = None,
        quota: Quota = DEFAULT,
        log: Path | None = None,
    ) -> None:
        self.data, self.home, self.limit, self.quota = data, state, limit, quota
        self.tell = Log(log or state / FILE, tell)
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            if state.stat().st_mode & 0o077:  # it was there already
                state.chmod(0o700)
            self.lock = Lock(state)
        except OSError as error:
            raise CheckpointError(
                f"{state} cannot be used for client states ({error.strerror}); make it writable, or name another "
                "folder with --state."
            ) from error
        try:
            self.ledger = None if budget is None else Ledger(budget, state)
        except CheckpointError:
            self.lock.release()
            raise
        self.agreement = Agreement(state, self.tell)
        self._workspace: tuple[str, Workspace] | None = None
        self._samples: tuple[str, NodeData] | None = None

    def close(self) -> None:
        """Release the folder."""
        self.lock.release()

    def answer(self, order: bytes, broadcast: bytes = b"") -> bytes:
        """The answer to a message; there is always one, whatever the message holds."""
        started, ticket = time.perf_counter(), ""
        try:
            request = Order.read(order, self.limit)
            ticket = request.ticket
            self.quota.count(self.home)
            assignment = Assignment.read(request.assignment)
            versions = self._versions(assignment)
            if (earlier_answer := versions.stored_answer(ticket)) is not None:
                self.tell("sending the last answer once more")
                return earlier_answer
            facts, tensors = self._carry_out(request, assignment, versions, broadcast)
            if self.ledger is None:
                facts["seconds"] = time.perf_counter() - started
            blob = pack("answer", {"ticket": ticket, **facts}, tensors)
            if WORK in request.do:
                versions.keep_answer(ticket, blob)
            return blob
        except FedLoomError as error:
            self.tell(f"refused: {error}")
            return _refusal(ticket, code_of(error))
        except OSError as error:  # of its folder, whatever its data: their readers turn errors into sentences
            self.tell(f"refused: {self.home} cannot be written ({error.strerror or error}); make room there.")
            return _refusal(ticket, Code.DISK)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self.tell(f"failed: {trace}")
            if self.ledger is not None:
                with writing(f"{self.home / STOPPED}, without which this node must not go on,", CheckpointError):
                    write_whole(self.home / STOPPED, trace.encode())
            return _refusal(ticket, Code.FAILED)

    def _versions(self, assignment: Assignment) -> Versions:
        if not (assignment.run.isalnum() and assignment.run.isascii() and len(assignment.run) <= RUN):
            raise WireError("an assignment has no run identifier of letters and digits.")
        self.quota.check_disk(self.home, assignment.run)
        return Versions(self.home / assignment.run)

    def _carry_out(
        self, order: Order, assignment: Assignment, versions: Versions, broadcast: bytes
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The facts and tensors of the answer to an order, after all checks of it."""
        if self.ledger is not None and (self.home / STOPPED).exists():
            raise Refusal(
                Code.STOPPED,
                "this node has a privacy budget, and an exception, which may depend on its data, stopped it; "
                f"delete {self.home / STOPPED} once you know why.",
            )
        workspace = self._prepare(assignment)
        versions.check_data(self._read(assignment).digest)
        if JOIN in order.do:
            return self._join(workspace, assignment), {}
        down = read_broadcast(broadcast, self.limit)
        plans = workspace.plan.levels
        if not 0 <= order.level < len(plans):
            raise WireError(f"an order is for level {order.level}, but there are {len(plans)}.")
        plan = plans[order.level]
        # a node measures the part of the whole model
        _check_broadcast(workspace, workspace.plan if EVALUATE in order.do else plan, down)
        if self.ledger is not None and set(order.do) != {WORK}:
            raise Refusal(
                Code.UNCOVERED,
                "this node has a privacy budget: it measures no losses and no metrics, which have no noise.",
            )
        if plan.is_private and {LOSSES, VALIDATION_LOSSES} & set(order.do):
            raise Refusal(
                Code.UNCOVERED,
                "an order asks for losses of training or validation samples, which no noise covers.",
            )
        received = workspace.plan.received_params(workspace.client, down.theta) if EVALUATE in order.do else down.theta
        first, client_plan = first_state(plan, received), workspace.plan.levels[workspace.plan.level[workspace.client]]
        versions.confirm(order.base, order.oldest, prune=WORK in order.do)
        state = None if order.base is None else versions.state(order.base, partial(client_forms, client_plan, first))
        if EVALUATE in order.do:
            return self._evaluate(workspace, down, state), {}
        return self._train(order, assignment, versions, workspace, down, first if state is None else state)

    def _join(self, workspace: Workspace, assignment: Assignment) -> dict[str, Any]:
        """What the server learns of this node before the first round."""
        sizes = self._read(assignment).sizes
        if self.ledger is not None:
            self.ledger.charge(workspace.plan, sizes[0], count=False)
        self.tell(f"joined with {sizes[0]} samples for training, {sizes[1]} for validation and {sizes[2]} for tests")
        return {"status": "joined", "sizes": sizes, "threads": torch.get_num_threads()}

    def _train(
        self,
        order: Order,
        assignment: Assignment,
        versions: Versions,
        workspace: Workspace,
        down: Broadcast,
        state: State,
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The losses and the local work that an order asks for."""
        plan, compute = workspace.plan.levels[order.level], self._compute(workspace, order.level)
        facts: dict[str, Any] = {"status": "done"}
        if LOSSES in order.do or VALIDATION_LOSSES in order.do:
            on_validation = VALIDATION_LOSSES in order.do
            if on_validation and plan.validation is None:
                raise WireError("an order asks for losses on validation samples, which the method does not need.")
            losses = compute.losses(down, np.array([workspace.client]), lambda client: state, on_validation)
            facts["loss_received"] = float(losses[0])
        if WORK not in order.do:
            return facts, {}
        self.quota.check_work(plan, self._read(assignment).sizes[0])
        if self.ledger is not None:
            epsilon = self.ledger.charge(plan, self._read(assignment).sizes[0])
            self.tell(f"with this answer ε = {epsilon:.3g} of {self.ledger.budget.epsilon:g} is spent")
        (result,) = compute.work(down, [workspace.client], [state])
        more, tensors = self._result(result, plan.is_private)
        if result.failure is None:
            more["version"] = versions.propose(down.round, order.ticket, result.state)
        self.tell(f"round {down.round + 1}: " + (f"left out, {result.failure}" if result.failure else "trained"))
        return facts | more, tensors

    def _prepare(self, assignment: Assignment) -> Workspace:
        key = json.dumps(assignment.facts, sort_keys=True)
        if self._workspace is None or self._workspace[0] != key:
            self._workspace = None
            data = self._read(assignment)
            if self.ledger is not None:  # what the settings alone do not suit is no reason to stop
                prepare_without_data(assignment, self.limit)
            try:
                self._workspace = key, prepare(assignment, data, self.limit)
            except FedLoomError as error:
                if self.ledger is None:
                    raise
                raise RuntimeError("the settings suit no data like this node's") from error
        return self._workspace[1]

    def _read(self, assignment: Assignment) -> NodeData:
        key, seed = self.agreement.hold(assignment.spec, int(assignment.values["seed"]))
        if self._samples is None or self._samples[0] != key:
            self._samples = key, read(self.data, assignment.spec, seed)
        return self._samples[1]

    def _compute(self, workspace: Workspace, level: int) -> Compute:
        """The compute of a level; a new one with secret draws of noise and samples, if privacy depends on them."""
        experiment, plan = workspace.experiment, workspace.plan.levels[level]
        factory = computes.make(experiment.compute, **experiment.compute_settings)
        if plan.is_private:
            return factory(replace(plan, noise_seed=secrets.randbits(128)))
        if level not in workspace.computes:
            workspace.computes[level] = factory(plan)
        return workspace.computes[level]

    def _result(self, result: Result, private: bool) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        if result.failure is not None:
            failure = result.failure
            if failure.trace:
                self.tell(failure.trace)
            if failure.trace and self.ledger is not None:
                raise RuntimeError(f"local work failed: {failure}")
            return {"status": "left out", "kind": failure.kind.value}, {}
        uploads = {f"uploads|{key}": value for key, value in flat(result.uploads).items()}
        tensors = {"update": result.update, "buffers": result.buffers, **uploads}
        loss = {} if private else {"loss": result.loss}  # no noise covers it
        return {**loss, "sent": result.traffic}, tensors

    def _evaluate(self, workspace: Workspace, down: Broadcast, state: State | None) -> dict[str, Any]:
        """Loss and metrics of the deployed model, as means over the node's test samples, and their number."""
        if not len(workspace.federation.held_out.index.rows):
            return {"status": "done", "n": 0, "values": {}}
        settings = workspace.experiment.evaluation.for_targets(workspace.plan.targets or CLASSES, common=False)
        evaluator = Evaluator(workspace.plan, workspace.federation, settings)
        server = Server(down.theta, down.buffers, down.parts, down.round)
        _, table = evaluator.clients(server, {} if state is None else {workspace.client: state})
        row = {name: float(column[0]) for name, column in table.items() if name not in ("client", "n")}
        return {"status": "done", "n": int(table["n"][0]), "values": row}


def _check_broadcast(workspace: Workspace, plan: ClientPlan, down: Broadcast) -> None:
    """Raise ``WireError`` if a broadcast does not fit the plan's model, or its slices the parts'."""
    layout = plan.layout
    for name, vector, size in (("theta", down.theta, layout.shared_size),
                               ("buffers", down.buffers, layout.shared_buffers)):  # fmt: skip
        if tuple(vector.shape) != (size,) or vector.dtype != layout.dtype:
            raise WireError(
                f"the received {name} has shape {list(vector.shape)} and type {vector.dtype}, but the model needs "
                f"[{size}] and {layout.dtype}."
            )
    slices = {(place, name) for place, part in plan.method.parts.items() for name in part.downloads}
    known_forms, received_forms = (
        forms(Server.initial(plan, plan.theta0, plan.buffers0).broadcast(plan).parts),
        forms(down.parts),
    )
    if (
        slices & received_forms.keys() - known_forms.keys()
    ):  # those that are there after a first round only, like FedProto's
        workspace.later_forms = workspace.later_forms or _forms_after_round(workspace)
        known_forms = workspace.later_forms | known_forms
    for key, form in received_forms.items():
        if key not in slices or form != known_forms.get(key):
            raise WireError(f"the broadcast holds the slice {key}, which no part of the method receives in this form.")
    if not (0 <= down.lr <= MODERATE and all(map(is_moderate, down.tensors))):
        raise Refusal(Code.BROADCAST, f"the received model has values that are not finite or beyond ±{MODERATE:g}.")


def _forms_after_round(workspace: Workspace) -> Forms:
    """The forms of a broadcast after a round of one client with two samples of zeros, whatever data the node has."""
    plan = prepare_without_data(replace(workspace.assignment, client=0, clients=1)).plan
    plan = replace(plan, all_clients=None, local=replace(plan.local, steps=1), noise_seed=0)
    start = Server.initial(plan, plan.theta0, plan.buffers0)
    after, _ = federated_round(plan, engines.make("serial")(plan, Live), start, {}, np.array([0]))
    return forms(after.broadcast(plan).parts)


def _refusal(ticket: str, code: Code) -> bytes:
    return pack("answer", {"ticket": ticket, "status": "refused", "code": code.value})
