"""An ensemble of experts; those that differ in numbers alone are one group over parameters [G, P], often vmapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from fedloom.core import meta as adapting
from fedloom.core import rng, tree
from fedloom.core.checks import at_least
from fedloom.core.client import State
from fedloom.core.context import NO_ROUND, Batch
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local, clip_factor
from fedloom.core.method import Method
from fedloom.core.objective import Net
from fedloom.core.parts import Adaptation, Term
from fedloom.core.plan import ClientPlan
from fedloom.core.subspace import pays
from fedloom.core.tree import Tree
from fedloom_apps.online.batches import TaskBatch, stored, task_batches
from fedloom_apps.online.experts import ExpertConfig, Group
from fedloom_apps.online.learners import OnlineLearner

MEMORY = "memory"  # the key of the stored tasks in the ensemble's state


@dataclass(frozen=True)
class ExpertEnsemble:
    """All experts on one model: pure functions from states to states and to predictions.

    The state of a group (``"0"``, ``"1"``, …) has its models ``w`` [G, P], the learner's vectors [G, P] and the numbers
    ``held`` of the tasks whose data it stores; the data are in ``"memory"``, shared by all groups.

    Args:
        experts: the configurations.
        model: the network; every expert starts at its current parameters.
        classes: number of classes of a task.
        objective: the terms of the loss.
        support: size of a support batch; 0 takes all of a task's training samples, as U^t is defined.
        seed: seed of all random numbers.
        device: device of the parameters and data.
        disjoint: whether support and query of a step share no sample, where a task has enough.

    Raises:
        ConfigError: if the model keeps batch statistics, or a setting is not supported here.
    """

    experts: tuple[ExpertConfig, ...]
    model: nn.Module
    classes: int
    objective: tuple[Term, ...]
    support: int = 0
    seed: int = 0
    device: str = "cpu"
    disjoint: bool = False
    plans: dict[int, tuple[ClientPlan, Net]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.experts:
            raise ConfigError("an online learner needs at least one expert.")
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
                raise ConfigError(
                    f"online learning cannot keep the batch statistics of {name!r}; choose group normalisation."
                )
        for expert in self.experts:
            if expert.local.momentum or expert.local.micro_batch or not expert.local.is_even:
                raise ConfigError(
                    "online learning takes plain gradient steps with one rate: local.optimiser=sgd, local.momentum=0, "
                    "no local.rates, micro_batch or step_schedule."
                )
            if expert.local.precision != "full":
                raise ConfigError("online learning computes in the precision of dtype; choose local.precision=full.")
            if expert.local.dp_clip is not None:
                raise ConfigError("online learning does not keep single samples private; leave local.dp_clip out.")
            if expert.local.stragglers:
                raise ConfigError("online learning has one learner, and no stragglers; leave local.stragglers out.")
        at_least(0, support=self.support)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of experts."""
        return Group.of(self.experts, self.plan(0)[0].layout.dtype)

    @property
    def on_host(self) -> bool:
        """Whether the experts compute on the host."""
        return torch.device(self.device).type == "cpu"

    def plan(self, kind: int, adaptation: Adaptation | None = None) -> tuple[ClientPlan, Net]:
        """The client plan and network; ``kind`` 0 is without adaptation, 1 with that of the first expert."""
        if kind not in self.plans:
            method = Method("online", self.objective, adaptation=self.experts[0].adaptation if kind else Adaptation())
            nothing = Arrays(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long), self.classes)
            plan = ClientPlan.of(self.model, method, Split(nothing, Index.of([[]])), Local(), self.seed, self.device)
            net = Net(copy.deepcopy(self.model).to(self.device), plan)
            self.plans[kind] = replace(plan, buffers0=plan.buffers0.to(self.device)), net
        plan, net = self.plans[kind]
        if adaptation is None:
            return plan, net
        return replace(plan, method=replace(plan.method, adaptation=adaptation)), net

    def finite(self, state: State) -> Tensor:
        """Whether the model of each expert is finite, bool [E]."""
        finite = torch.ones(len(self.experts), dtype=torch.bool)
        for place, group in enumerate(self.groups):
            finite[list(group.places)] = torch.isfinite(state[str(place)]["w"]).all(1).cpu()
        return finite

    def init(self) -> State:
        """The state before the first task."""
        plan, _ = self.plan(0)
        w = plan.theta0.to(self.device)
        state: State = {MEMORY: {}}
        for place, group in enumerate(self.groups):
            alone = {"w": w, **group.first.learner.init(w)}
            state[str(place)] = {name: value.repeat(len(group.places), 1) for name, value in alone.items()}
            state[str(place)]["held"] = torch.zeros(0, dtype=torch.long)
        return state

    def predict(
        self, state: State, support: Batch, x: Tensor, only: Sequence[int] | None = None, many: bool = False
    ) -> Tensor:
        """Logits of models adapted with a task's training samples, [E, N, C].

        Args:
            state: state of the ensemble.
            support: the task's training samples; with ``many`` those of several tasks, [T, n, ...].
            x: inputs [N, ...], or [T, N, ...].
            only: the experts to evaluate, in ascending order; by default all.
            many: whether the inputs have an axis of tasks; then the result is [E, T, N, C].
        """
        predictions: dict[int, Tensor] = {}
        with torch.no_grad():
            for place, group, rows in self._selected(only):
                w = state[str(place)]["w"][rows]
                numbers = {name: value[rows].to(self.device) for name, value in group.numbers.items()}

                def one(w: Tensor, numbers: Tree, group: Group = group) -> Tensor:
                    _, adaptation, _, _ = group.instantiate(numbers)
                    plan, net = self.plan(1, adaptation)
                    net.eval()

                    def task(sx: Tensor, sy: Tensor, x: Tensor) -> Tensor:
                        return adapting.deployed(plan, net, w, plan.buffers0, Batch(sx, sy))(x)

                    data = (support.x, support.y, x)
                    return self._each(task, *data, always=True) if many else task(*data)

                logits = self._each(one, w, numbers)
                predictions |= {group.places[row]: logits[i] for i, row in enumerate(rows)}
        return torch.stack([predictions[expert] for expert in sorted(predictions)])

    def unadapted(self, state: State, x: Tensor, only: Sequence[int] | None = None) -> Tensor:
        """Logits of the models without adaptation, [E, N, C]."""
        plan, net = self.plan(0)
        net.eval()
        model = adapting.forward(plan, net, plan.buffers0)
        predictions: dict[int, Tensor] = {}
        with torch.no_grad():
            for place, group, rows in self._selected(only):
                logits = self._each(lambda w: model(w, x).logits, state[str(place)]["w"][rows])
                predictions |= {group.places[row]: logits[i] for i, row in enumerate(rows)}
        return torch.stack([predictions[expert] for expert in sorted(predictions)])

    def _selected(self, only: Sequence[int] | None) -> Iterator[tuple[int, Group, list[int]]]:
        """Index and group of each group that holds some of the experts, with their rows in it."""
        for place, group in enumerate(self.groups):
            rows = [row for row, expert in enumerate(group.places) if only is None or expert in only]
            if rows:
                yield place, group, rows

    def learn(self, state: State, t: int, arrays: Arrays, only: Sequence[int] | None = None) -> tuple[State, Tensor]:
        """Train on the t-th task's training samples: the new state, and each expert's mean loss over its steps [E].

        The given state is not modified.

        Args:
            state: the state before the task.
            t: the task's number.
            arrays: the task's training samples.
            only: the experts that learn; the others are unchanged and store no data.
        """
        memory = state[MEMORY] | stored(t, arrays)
        new: State = {place: dict(tree) for place, tree in state.items()}
        losses = torch.full((len(self.experts),), float("nan"))
        kept: set[int] = set()
        for place in range(len(self.groups)):
            new[str(place)]["held"] = torch.zeros(0, dtype=torch.long)
        for place, group, rows in self._selected(only):
            old, learner = state[str(place)], group.first.learner
            stored_tasks = old["held"].tolist()
            if learner.trains:
                local = group.first.local
                steps = task_batches(learner, local, self.support, memory, stored_tasks, t, self.seed, self.disjoint)
                after, loss = self._descend(group, rows, old, steps, t)
                new[str(place)] |= after
                losses[[group.places[row] for row in rows]] = loss.cpu().to(losses.dtype)
            stored_tasks = list(learner.keep(stored_tasks, t, rng.stream(self.seed, "online memory", t)))
            new[str(place)]["held"] = torch.tensor(stored_tasks, dtype=torch.long)
            kept |= set(stored_tasks)
        new[MEMORY] = {name: value for name, value in memory.items() if int(name.partition("/")[0]) in kept}
        return new, losses

    def _descend(
        self, group: Group, rows: list[int], old: Tree, steps: Sequence[Sequence[TaskBatch]], t: int
    ) -> tuple[Tree, Tensor]:
        """K steps of w ← w - β(∇L(w) + ∇R(w)), clipped, with weight decay: the new state and the mean loss."""
        rng.seed_torch(self.seed, "dropout", t)
        state = {name: value[rows] for name, value in old.items() if name not in ("w", "held")}
        numbers = {name: value[rows].to(self.device) for name, value in group.numbers.items()}
        local = group.first.local
        w = self._each(lambda w, state: group.first.learner.begin(w, state), old["w"][rows], state)
        clip, decay = local.clip, local.decay(t)
        total = torch.zeros(len(w), dtype=w.dtype, device=w.device)
        together = self.stacked and len(w) > 1
        for material in steps:

            def step(
                w: Tensor, state: Tree, numbers: Tree, at: Sequence[TaskBatch] = material
            ) -> tuple[Tensor, Tensor]:
                learner, adaptation, lr, decayed = group.instantiate(numbers)
                loss = self._loss(learner, adaptation, at)
                grad, value = grad_and_value(loss)(w) if together else adapting.gradient(loss, w)
                grad = grad + learner.regulariser_grad(w, state)
                if clip is not None:
                    grad = grad * clip_factor(torch.linalg.vector_norm(grad), clip)
                return w - lr * decay * (grad + decayed * w), value

            with torch.no_grad():
                w, value = self._each(step, w, state, numbers)
            total += value

        def end(w: Tensor, state: Tree, numbers: Tree) -> Tree:
            return group.instantiate(numbers)[0].end(w, state)

        after = {"w": w, **self._each(end, w, state, numbers)}
        if len(rows) < len(group.places):
            after = {name: old[name].index_copy(0, torch.tensor(rows, device=w.device), v) for name, v in after.items()}
        return after, total / max(len(steps), 1)

    def _loss(
        self, learner: OnlineLearner, adaptation: Adaptation, material: Sequence[TaskBatch]
    ) -> Callable[[Tensor], Tensor]:
        """The mean of f∘U over a step's tasks (of f if learner or adaptation train without U) as a function of w."""
        plan, net = self.plan(1, adaptation) if learner.adapts and adaptation.trains else self.plan(0)
        net.train()
        contexts = dict.fromkeys(plan.method.parts, NO_ROUND)

        def loss(w: Tensor, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
            return adapting.objective(plan, net, plan.buffers0, Batch(sx, sy), Batch(qx, qy), contexts)(w)

        tasks = [(support.x, support.y, query.x, query.y) for support, query in material]
        alike = all(x.shape == y.shape for task in tasks for x, y in zip(task, tasks[0], strict=True))
        if (
            len(tasks) > 1 and alike and self.stacked and pays(plan, net, tasks[0][0], together=True)
        ):  # else a copy of w for each task
            columns = [torch.stack(column) for column in zip(*tasks, strict=True)]
            return lambda w: vmap(partial(loss, w), randomness="different")(*columns).mean()
        return lambda w: torch.stack([loss(w, *task) for task in tasks]).mean()

    @cached_property
    def stacked(self) -> bool:
        """Whether experts of a group, and tasks of an evaluation, are one vmapped computation or run in turn.

        ``vmap`` cannot run modules that declare ``stackable = False``, such as LSTMs, and turns convolutions with
        different weights per model into grouped ones, which are slower on a CPU.
        """
        modules = list(self.model.modules())
        slow = self.device == "cpu" and any(isinstance(module, _ConvNd) for module in modules)
        return not slow and all(getattr(module, "stackable", True) for module in modules)

    def _each(self, f: Callable[..., Any], *trees: Any, always: bool = False) -> Any:
        """Apply ``f`` along the first axis, of a group's experts or (``always`` in one call, if stacked) of tasks."""
        count = len(trees[0])
        if self.stacked and (always or count > 1):
            return vmap(f, randomness="different")(*trees)
        return _stacked([f(*(_row(tree, i) for tree in trees)) for i in range(count)])


def _row(value: Any, i: int) -> Any:
    return {name: values[i] for name, values in value.items()} if isinstance(value, dict) else value[i]


def _stacked(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, dict):
        return {name: torch.stack([result[name] for result in results]) for name in first}
    if isinstance(first, tuple):
        return tuple(torch.stack(column) for column in zip(*results, strict=True))
    return torch.stack(list(results))


def task_bytes(state: State) -> int:
    """Bytes of stored task data, counted from the tensors in the state."""
    return tree.nbytes(state[MEMORY])


def state_bytes(state: State) -> int:
    """Bytes of the models and state vectors of all experts."""
    return sum(tree.nbytes(group) for place, group in state.items() if place != MEMORY)
