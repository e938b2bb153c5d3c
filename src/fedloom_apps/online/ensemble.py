"""An ensemble of experts; experts that differ in numbers alone are one group with parameters [G, P], often vmapped.

Experts of an online learner: their configurations, grids of them, and groups that differ in numbers alone. The
mini-batches of the K steps at a task: which tasks and samples, as a function of (seed, task).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from fedloom.base import rng, tree
from fedloom.base.checks import all_hold
from fedloom.base.errors import ConfigError
from fedloom.base.settings import format_unquoted
from fedloom.base.tree import Tree
from fedloom.core.context import NO_ROUND, Batch
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local, clip_factor
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation, Term
from fedloom.core.slots import label
from fedloom.rounds import meta as adapting
from fedloom.rounds.exchange import State
from fedloom.rounds.objective import Net
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.subspace import layer_in_basis
from fedloom_apps.online.learners import OnlineLearner


@dataclass(frozen=True)
class ExpertConfig:
    """The configuration of one expert: its learner, its adaptation and its K steps.

    Args:
        learner: the online method.
        adaptation: U.
        local: K (``steps``), β (``lr``), batch size, weight decay and clipping.
    """

    learner: OnlineLearner
    adaptation: Adaptation
    local: Local

    def vmapped_fields(self) -> dict[str, float]:
        """The numeric settings in which the experts of one group may differ, by dotted name."""
        values = {f"learner.{name}": getattr(self.learner, name) for name in self.learner.vmapped_fields}
        if any(f.name == "lr" for f in fields(self.adaptation)):
            values["adaptation.lr"] = self.adaptation.lr  # type: ignore[attr-defined]
        return values | {"local.lr": self.local.lr, "local.weight_decay": self.local.weight_decay}

    def static_fields(self) -> tuple[Any, ...]:
        """All other settings, which the experts of a group share."""
        vmapped = self.vmapped_fields()
        parts = (("learner", self.learner), ("adaptation", self.adaptation), ("local", self.local))
        settings = (
            (section, type(part), f.name, getattr(part, f.name))
            for section, part in parts
            for f in fields(part)
            if f"{section}.{f.name}" not in vmapped
        )
        return tuple((*key, tuple(value.items()) if isinstance(value, Mapping) else value) for *key, value in settings)


def grid(
    learner: OnlineLearner, adaptation: Adaptation, local: Local, over: Mapping[str, Sequence[Any]]
) -> tuple[ExpertConfig, ...]:
    """Make the experts of a grid of settings, like ``{"learner.alpha": (1, 5), "local.steps": (10, 20)}``.

    >>> from fedloom.parts.adaptation import Maml
    >>> from fedloom_apps.online.learners import Moml
    >>> experts = grid(Moml(), Maml(), Local(steps=10), {"learner.alpha": (1.0, 5.0), "adaptation.lr": (0.1, 0.01)})
    >>> [(e.learner.alpha, e.adaptation.lr) for e in experts]
    [(1.0, 0.1), (1.0, 0.01), (5.0, 0.1), (5.0, 0.01)]

    Raises:
        ConfigError: if a key is not a setting.
    """
    base = {"learner": learner, "adaptation": adaptation, "local": local}
    experts = []
    for key in over:
        part, _, name = key.partition(".")
        if part not in base or name not in {f.name for f in fields(base[part])}:
            raise ConfigError(f"a grid cannot vary {key!r}: it is not a setting of learner, adaptation or local.")
    for values in itertools.product(*over.values()):
        experts.append(ExpertConfig(**_with_settings(base, dict(zip(over, values, strict=True)))))
    return tuple(experts)


def _with_settings(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Parts by name with other values of settings like ``learner.alpha``."""
    result = dict(parts)
    for key, value in settings.items():
        part, _, name = key.partition(".")
        result[part] = replace(result[part], **{name: value})
    return result


@dataclass(frozen=True)
class ExpertGroup:
    """Experts that differ in numbers alone.

    Attributes:
        places: their indices among all experts.
        first: the first of them.
        numbers: the settings that differ, [G] each.
    """

    places: tuple[int, ...]
    first: ExpertConfig
    numbers: Tree

    @classmethod
    def of(cls, experts: Sequence[ExpertConfig], dtype: torch.dtype) -> tuple[ExpertGroup, ...]:
        """Partition experts into groups."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for place, expert in enumerate(experts):
            kinds.setdefault(expert.static_fields(), []).append(place)
        groups = []
        for places in kinds.values():
            settings = [experts[place].vmapped_fields() for place in places]
            varying_names = [name for name in settings[0] if len({values[name] for values in settings}) > 1]
            numbers = {name: torch.tensor([values[name] for values in settings], dtype=dtype) for name in varying_names}
            groups.append(cls(tuple(places), experts[places[0]], numbers))
        return tuple(groups)

    def instantiate(self, numbers: Mapping[str, Any]) -> tuple[OnlineLearner, Adaptation, Any, Any]:
        """Learner, adaptation, β and weight decay with the given numbers substituted."""
        first = self.first
        settings = {key: value for key, value in numbers.items() if not key.startswith("local.")}
        parts = _with_settings({"learner": first.learner, "adaptation": first.adaptation}, settings)
        lr, decay = (numbers.get(f"local.{name}", getattr(first.local, name)) for name in ("lr", "weight_decay"))
        return parts["learner"], parts["adaptation"], lr, decay


def expert_label(expert: ExpertConfig) -> str:
    """A label for tables: the expert's steps K or epochs E, its adaptation and the settings of its learner.

    >>> from fedloom.parts.adaptation import Maml
    >>> from fedloom_apps.online.learners import Moml
    >>> expert_label(ExpertConfig(Moml(alpha=1.0), Maml(lr=0.1), Local(steps=10)))
    'K 10, maml(lr 0.1, steps 1), alpha 1'
    """

    def setting_texts(part: OnlineLearner | Adaptation, *names: str) -> list[str]:
        settings = [(name, getattr(part, name)) for name in names]
        return [
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {format_unquoted(value)}"
            for name, value in settings
        ]

    learner_texts = setting_texts(expert.learner, *(f.name for f in fields(expert.learner)))
    names = (f.name for f in fields(expert.adaptation) if f.name in ("lr", "steps"))
    adaptation_texts = setting_texts(expert.adaptation, *names)
    name = label(expert.adaptation)
    amount = f"E {expert.local.epochs}" if expert.local.steps is None else f"K {expert.local.steps}"
    steps = [amount] if expert.learner.trains else []
    return ", ".join([*steps, f"{name}({', '.join(adaptation_texts)})" if adaptation_texts else name, *learner_texts])


TaskBatch = tuple[Batch, Batch]  # support and query of one task


def task_entries(number: int, arrays: Arrays) -> Tree:
    """A task's training samples, as entries of the memory of an ensemble's state.

    >>> list(task_entries(7, Arrays(torch.zeros(1, 2), torch.tensor([0]), 1)))
    ['000007/x', '000007/y']
    """
    return {f"{number:06d}/x": arrays.x, f"{number:06d}/y": arrays.y}


def stored_batch(memory: Mapping[str, Tensor], number: int) -> Batch:
    """All samples of a stored task."""
    return Batch(memory[f"{number:06d}/x"], memory[f"{number:06d}/y"])


def task_batches(
    learner: OnlineLearner,
    local: Local,
    support: int,
    memory: Mapping[str, Tensor],
    stored: Sequence[int],
    t: int,
    seed: int,
    disjoint: bool = False,
) -> list[list[TaskBatch]]:
    """The batches of the K steps at task t: for each step, a support and a query batch of every task it uses.

    Tasks are drawn uniformly, without replacement within a step. A task's samples are visited in shuffled passes, as a
    client's are in local training, so that its batch in step k depends on (seed, t, its number, k) alone. Support
    and query use separate passes and may share samples.

    Args:
        learner: selects the tasks.
        local: K, and the size of a query batch. Without ``steps``, K is the number of query batches of ``epochs``
            passes over the new task.
        support: size of a support batch; 0 takes all samples of the task.
        memory: the stored tasks and the new one.
        stored: the numbers of the tasks that the learner has stored.
        t: the number of the new task.
        seed: seed of the experiment.
        disjoint: whether a step's support is drawn from the samples that are not in its query, if these are enough.
    """
    candidates = list(learner.tasks(stored, t))
    draw = rng.stream(seed, "online tasks", t)
    if not learner.adapts:
        return _pooled_batches(local, memory, candidates, draw)
    steps = local.steps_for(len(memory[f"{t:06d}/y"]))
    batches: dict[tuple[int, str], list[np.ndarray]] = {}

    def rows(number: int, purpose: str, size: int, step: int) -> Tensor:
        if (number, purpose) not in batches:
            count = len(memory[f"{number:06d}/y"])
            passes = replace(local, steps=steps, batch_size=size)
            batches[number, purpose] = passes.batches(np.arange(count), seed, t, number, f"online {purpose}")
        return torch.from_numpy(batches[number, purpose][step])

    def pair(number: int, step: int) -> TaskBatch:
        samples = stored_batch(memory, number)
        query = rows(number, "query", local.batch_size, step)
        if not support:
            return samples, Batch(samples.x[query], samples.y[query])
        remaining = np.setdiff1d(np.arange(len(samples.y)), query.numpy())
        if disjoint and len(remaining) >= support:
            order = rng.stream(seed, "online support", t, number, step).permutation(remaining)
            support_rows = torch.from_numpy(order[:support])
        else:
            support_rows = rows(number, "support", support, step)
        return Batch(samples.x[support_rows], samples.y[support_rows]), Batch(samples.x[query], samples.y[query])

    count = min(learner.tasks_per_step() or len(candidates), len(candidates))
    result = []
    for step in range(steps):
        numbers = candidates
        if count < len(candidates):
            numbers = [candidates[i] for i in draw.choice(len(candidates), count, replace=False)]
        result.append([pair(number, step) for number in numbers])
    return result


def _pooled_batches(
    local: Local, memory: Mapping[str, Tensor], candidates: Sequence[int], draw: np.random.Generator
) -> list[list[TaskBatch]]:
    """Mini-batches from the samples of all tasks together; the support is empty."""
    sizes = [len(memory[f"{number:06d}/y"]) for number in candidates]
    ends = np.cumsum(sizes)
    parts = []
    for _ in range(local.steps_for(sizes[-1])):
        size = min(local.batch_size or int(ends[-1]), int(ends[-1]))
        positions = draw.choice(int(ends[-1]), size, replace=False) if size < ends[-1] else np.arange(size)
        owners = np.searchsorted(ends, positions, side="right")
        samples = [
            (stored_batch(memory, candidates[o]), int(i - (ends[o - 1] if o else 0)))
            for o, i in zip(owners, positions, strict=True)
        ]
        query = Batch(torch.stack([b.x[i] for b, i in samples]), torch.stack([b.y[i] for b, i in samples]))
        parts.append([(Batch(query.x[:0], query.y[:0]), query)])
    return parts


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
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
                raise ConfigError(
                    f"online learning cannot keep the batch statistics of {name!r}; choose group normalisation."
                )
        for local in (expert.local for expert in self.experts):
            conditions = {
                "takes plain gradient steps with one rate: local.optimiser=sgd, local.momentum=0, no local.rates, "
                "micro_batch or step_schedule": local.is_even and not local.momentum and not local.micro_batch,
                "computes in the precision of dtype; choose local.precision=full": local.precision == "full",
                "does not keep single samples private; leave local.dp_clip out": local.dp_clip is None,
                "has one learner, and no stragglers; leave local.stragglers out": not local.stragglers,
            }
            all_hold("online learning ", conditions)

    @cached_property
    def groups(self) -> tuple[ExpertGroup, ...]:
        """The groups of experts."""
        return ExpertGroup.of(self.experts, self.plan(0)[0].layout.dtype)

    @property
    def on_host(self) -> bool:
        """Whether the experts compute on the host."""
        return torch.device(self.device).type == "cpu"

    def plan(self, kind: int, adaptation: Adaptation | None = None) -> tuple[ClientPlan, Net]:
        """The client plan and network; without adaptation for ``kind`` 0, with the first expert's for 1."""
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

    def is_finite(self, state: State) -> Tensor:
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
            expert_state = {"w": w, **group.first.learner.init(w)}
            state[str(place)] = {name: value.repeat(len(group.places), 1) for name, value in expert_state.items()}
            state[str(place)]["held"] = torch.zeros(0, dtype=torch.long)
        return state

    def predict(
        self, state: State, support: Batch | None, x: Tensor, only: Sequence[int] | None = None, many: bool = False
    ) -> Tensor:
        """Logits of models adapted with a task's training samples, [E, N, C].

        Args:
            state: state of the ensemble.
            support: the task's training samples; with ``many`` those of several tasks, [T, n, ...]. With None models
                are not adapted.
            x: inputs [N, ...], or [T, N, ...].
            only: the experts to evaluate, in ascending order; by default all.
            many: whether the inputs have an axis of tasks; then the result is [E, T, N, C].
        """
        predictions: dict[int, Tensor] = {}
        with torch.no_grad():
            for place, group, rows in self._group_rows(only):
                w = state[str(place)]["w"][rows]
                numbers = {name: value[rows].to(self.device) for name, value in group.numbers.items()}

                def predict_expert(w: Tensor, numbers: Tree, group: ExpertGroup = group) -> Tensor:
                    if support is None:
                        plan, net = self.plan(0)
                        return adapting.forward(plan, net.eval(), plan.buffers0)(w, x).logits
                    _, adaptation, _, _ = group.instantiate(numbers)
                    plan, net = self.plan(1, adaptation)
                    net.eval()

                    def predict_task(sx: Tensor, sy: Tensor, x: Tensor) -> Tensor:
                        return adapting.deployed_model(plan, net, w, plan.buffers0, Batch(sx, sy))(x)

                    data = (support.x, support.y, x)
                    return self._map(predict_task, *data, always=True) if many else predict_task(*data)

                logits = self._map(predict_expert, w, numbers)
                predictions |= {group.places[row]: logits[i] for i, row in enumerate(rows)}
        return torch.stack([predictions[expert] for expert in sorted(predictions)])

    def _group_rows(self, only: Sequence[int] | None) -> Iterator[tuple[int, ExpertGroup, list[int]]]:
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
        memory = state[MEMORY] | task_entries(t, arrays)
        next_state: State = {place: dict(tree) for place, tree in state.items()}
        losses = torch.full((len(self.experts),), float("nan"))
        task_numbers: set[int] = set()
        for place in range(len(self.groups)):
            next_state[str(place)]["held"] = torch.zeros(0, dtype=torch.long)
        for place, group, rows in self._group_rows(only):
            group_state, learner = state[str(place)], group.first.learner
            stored_tasks = group_state["held"].tolist()
            if learner.trains:
                local = group.first.local
                steps = task_batches(learner, local, self.support, memory, stored_tasks, t, self.seed, self.disjoint)
                group_update, loss = self._descend(group, rows, group_state, steps, t)
                next_state[str(place)] |= group_update
                losses[[group.places[row] for row in rows]] = loss.cpu().to(losses.dtype)
            stored_tasks = list(learner.keep(stored_tasks, t, rng.stream(self.seed, "online memory", t)))
            next_state[str(place)]["held"] = torch.tensor(stored_tasks, dtype=torch.long)
            task_numbers |= set(stored_tasks)
        next_state[MEMORY] = {name: x for name, x in memory.items() if int(name.partition("/")[0]) in task_numbers}
        return next_state, losses

    def _descend(
        self, group: ExpertGroup, rows: list[int], group_state: Tree, steps: Sequence[Sequence[TaskBatch]], t: int
    ) -> tuple[Tree, Tensor]:
        """K steps of w ← w - β(∇L(w) + ∇R(w)), clipped, with weight decay: the new state and the mean loss."""
        rng.seed_torch(self.seed, "dropout", t)
        state = {name: value[rows] for name, value in group_state.items() if name not in ("w", "held")}
        numbers = {name: value[rows].to(self.device) for name, value in group.numbers.items()}
        local = group.first.local
        w = self._map(lambda w, state: group.first.learner.begin(w, state), group_state["w"][rows], state)
        clip, decay = local.clip, local.decay(t)
        total = torch.zeros(len(w), dtype=w.dtype, device=w.device)
        is_vmapped = self.stacked and len(w) > 1
        for batches in steps:

            def step(
                w: Tensor, state: Tree, numbers: Tree, task_list: Sequence[TaskBatch] = batches
            ) -> tuple[Tensor, Tensor]:
                learner, adaptation, lr, weight_decay = group.instantiate(numbers)
                loss = self._loss(learner, adaptation, task_list)
                grad, value = grad_and_value(loss)(w) if is_vmapped else adapting.gradient(loss, w)
                grad = grad + learner.regulariser_grad(w, state)
                if clip is not None:
                    grad = grad * clip_factor(torch.linalg.vector_norm(grad), clip)
                return w - lr * decay * (grad + weight_decay * w), value

            with torch.no_grad():
                w, value = self._map(step, w, state, numbers)
            total += value

        def end(w: Tensor, state: Tree, numbers: Tree) -> Tree:
            return group.instantiate(numbers)[0].end(w, state)

        new_state = {"w": w, **self._map(end, w, state, numbers)}
        if len(rows) < len(group.places):
            indices = torch.tensor(rows, device=w.device)
            new_state = {name: group_state[name].index_copy(0, indices, value) for name, value in new_state.items()}
        return new_state, total / max(len(steps), 1)

    def _loss(
        self, learner: OnlineLearner, adaptation: Adaptation, batches: Sequence[TaskBatch]
    ) -> Callable[[Tensor], Tensor]:
        """The mean of f∘U over a step's tasks (of f if learner or adaptation train without U) as a function of w."""
        plan, net = self.plan(1, adaptation) if learner.adapts and adaptation.trains else self.plan(0)
        net.train()
        contexts = dict.fromkeys(plan.method.parts, NO_ROUND)

        def loss(w: Tensor, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
            return adapting.objective(plan, net, plan.buffers0, Batch(sx, sy), Batch(qx, qy), contexts)(w)

        tasks = [(support.x, support.y, query.x, query.y) for support, query in batches]
        same_shapes = all(x.shape == y.shape for task in tasks for x, y in zip(task, tasks[0], strict=True))
        if (
            len(tasks) > 1 and same_shapes and self.stacked and layer_in_basis(plan, net, tasks[0][0], together=True)
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

    def _map(self, f: Callable[..., Any], *trees: Any, always: bool = False) -> Any:
        """Apply ``f`` along the first axis, of a group's experts or (``always`` in one call, if stacked) of tasks."""
        count = len(trees[0])
        if self.stacked and (always or count > 1):
            return vmap(f, randomness="different")(*trees)
        results = [f(*tree_map(lambda value, i=i: value[i], trees)) for i in range(count)]
        return tree_map(lambda *values: torch.stack(values), *results)


def task_bytes(state: State) -> int:
    """Bytes of stored task data, counted from the tensors in the state."""
    return tree.nbytes(state[MEMORY])


def state_bytes(state: State) -> int:
    """Bytes of the models and state vectors of all experts."""
    return sum(tree.nbytes(group) for place, group in state.items() if place != MEMORY)
