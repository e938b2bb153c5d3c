"""The identity of an experiment: all settings that its results depend on, as plain data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.base.settings import to_plain
from fedloom.compute import resolved
from fedloom.core import identity
from fedloom.core.local import Local
from fedloom.core.samples import Samples
from fedloom.data.augment import augmentation
from fedloom.experiment.atomic import raw
from fedloom.experiment.experiment import Experiment
from fedloom.rounds.plan import ClientPlan
from fedloom.timing.schedules import Rounds
from fedloom.timing.selection import Uniform

ADAM = ("beta1", "beta2")
IF_CHANGED = (  # settings of local training that are described where they differ from their defaults
    "last_batch", "micro_batch", "schedule", "milestones", "horizon", "lr_end", "warmup", "step_schedule", "rates",
)  # fmt: skip
SAMPLED = 1000  # number of input rows in the digest
READ = 16  # the same where each is read and put together by a user's code
STEPPED = ("compute", "shares")  # how clients are stepped; with compute=auto, other versions may choose otherwise
ABOUT_WORK = (*STEPPED, "client_local", "presence", "schedule", "selection", "devices", "edges")


def describe(experiment: Experiment, plan: ClientPlan) -> dict[str, Any]:
    """The experiment as nested plain data; runs with equal descriptions give equal bits on one machine.

    The number of rounds, unless a part depends on it, the engine and the evaluations are left out: they do not change
    what was computed so far.
    """
    federation, method = experiment.federation, experiment.method
    arrays, index, relabel = federation.train.arrays, federation.train.index, federation.train.relabel
    targets = () if arrays.has_structures else (arrays.y.numpy(),)
    names = () if relabel is None else (relabel.numpy(),)
    parts = {place: identity.of_part(part) for place, part in method.parts.items()}
    networks, edges = getattr(method.personal, "members", ()), getattr(method.topology, "pairs", None)
    compute, shares = resolved(experiment.compute, plan), experiment.compute_settings.get("shares")
    return {
        "method": {"name": method.name, "pooled": method.pooled, **parts},
        "local": _local(experiment.local),
        **(
            {"client_local": client_settings}
            if (client_settings := {str(k): _local(v) for k, v in experiment.own_local.items()})
            else {}
        ),
        **({"presence": to_plain(experiment.spans)} if experiment.presence else {}),
        **({"networks": [*networks]} if networks else {}),
        **({"edges": identity.of_file(edges) if isinstance(edges, Path) else repr(edges)} if edges else {}),
        "sampling": {
            "participation": experiment.participation,
            "cohort": experiment.cohort,
            "kind": experiment.sampling,
            "drop_rate": experiment.drop_rate,
        },
        "federation": {
            "clients": len(federation),
            "samples": len(arrays),
            "digest": _digest(index.rows, index.offsets, *targets, *names, *_sample(arrays.x)),
            **({"collate": identity.of_function(arrays.x.collate)} if isinstance(arrays.x, Samples) else {}),
            **({"unseen": federation.unseen} if federation.unseen else {}),
        },
        "model": {
            "parameters": plan.layout.size,
            "digest": _digest(*_layers(plan), raw(plan.theta0), raw(plan.buffers0)),
        },
        **({"augment": [repr(augmentation(a)) for a in experiment.augment]} if experiment.augment else {}),
        **({"attack": repr(experiment.attack)} if plan.attack else {}),
        **({"schedule": identity.of_part(experiment.schedule)} if experiment.schedule != Rounds() else {}),
        **({"selection": identity.of_part(experiment.selection)} if experiment.selection != Uniform() else {}),
        **({"devices": identity.of_part(experiment.devices)} if experiment.devices else {}),
        **_beside(experiment, plan),
        "seed": experiment.seed,
        "dtype": experiment.dtype,
        **({"rounds": experiment.rounds} if method.needs("rounds") else {}),
        "compute": compute,  # computes differ by rounding, and so do blocks of clients
        **({"shares": shares} if compute == "batched" and shares else {}),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The settings that differ, each as ``name: old → new``.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b: 1 → 3']
    """
    changes = []
    for key in [*old, *(key for key in new if key not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            changes.append(f"{prefix}{key}: {a} → {b}")
    return changes


def of_other_models(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ in two descriptions and say that one's models are not the other's.

    How clients are stepped, when they work and with what settings of their own, whom they hear, and the code of a
    user's own functions decide how a run goes on, but not what the models are that it has trained.

    >>> of_other_models({"seed": 0, "compute": "live"}, {"seed": 1, "compute": "batched"})
    ['seed: 0 → 1']
    """
    left, right = (
        {k: _without_code(value) for k, value in description.items() if k not in ABOUT_WORK}
        for description in (old, new)
    )
    return differences(left, right)


def of_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that differ in two descriptions by the code of a user's own functions alone."""
    pairs = (differences({key: old[key]}, {key: new[key]}) for key in old if key in new and key not in STEPPED)
    return [] if of_other_models(old, new) else [sentence for pair in pairs for sentence in pair]


def _without_code(value: Any) -> Any:
    """A description without the checksums of a user's code."""
    if isinstance(value, Mapping):
        return {key: _without_code(entry) for key, entry in value.items()}
    return identity.CODE.sub("", value) if isinstance(value, str) else value


def about(experiment: Experiment, plan: ClientPlan) -> dict[str, Any]:
    """Data, model and number of rounds of a run started from Python, which has no settings.

    Nothing in it depends on the seed. Empty entries are left out: a hand-made federation does not describe its data.
    """
    provenance = experiment.federation.provenance
    content = {
        "data": {**provenance.get("source", {}), "noise": provenance.get("noise")},
        **{
            key: provenance[key]
            for key in ("partition", "validation", "held_out", "target", "shared")
            if provenance.get(key)
        },
        "model": {"layers": f"{type(plan.model).__name__} {_digest(*_layers(plan))}"},
        "rounds": experiment.rounds,
    }
    return _lasting(content)


def _lasting(value: Any) -> Any:
    """Plain data without empty entries, values that depend on the seed, and non-settings; other objects as text."""
    if isinstance(value, Mapping):
        unsaid = ("licence", "citation", "seed", "wrong")
        entries = {str(key): _lasting(entry) for key, entry in value.items() if key not in unsaid}
        return {key: entry for key, entry in entries.items() if entry not in (None, {})}
    if isinstance(value, list | tuple):
        return [_lasting(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _layers(plan: ClientPlan) -> list[np.ndarray]:
    """A model's layers with their settings, and the positions of its parameters, without their values."""
    modules = re.sub(r"0x[0-9a-f]+", "", repr(plan.model))  # without memory addresses
    return [np.frombuffer(text.encode(), np.uint8) for text in (modules, *map(repr, plan.layout.parameters))]


def _local(local: Local) -> dict[str, Any]:
    """The settings of local training, without those that are not used."""
    unused = ("optimiser", *ADAM) if local.optimiser == "sgd" else ()
    unused = (*unused, "precision") if local.precision == "full" else unused
    unused = (*unused, "dp_clip", "dp_noise", "dp_delta") if local.dp_clip is None else unused
    unused = (*unused, *(name for name in ("poisson", "stragglers") if not getattr(local, name)))
    unused = (*unused, *(name for name in IF_CHANGED if getattr(local, name) == getattr(Local(), name)))
    values = {name: getattr(local, name) for name in asdict(local) if name not in unused}
    return {name: identity.of_function(v) if callable(v) else to_plain(v) for name, v in values.items()}


def _beside(experiment: Experiment, plan: ClientPlan) -> dict[str, Any]:
    """Inputs that only some methods depend on: a teacher, unlabelled inputs and their views."""
    inputs: dict[str, Any] = {}
    unlabelled = experiment.federation.unlabelled
    if plan.teacher is not None:
        inputs["teacher"] = _digest(*(raw(t) for t in plan.teacher.state_dict().values()))
    if unlabelled is not None and experiment.method.uses_unlabelled:
        inputs["target"] = _digest(raw(unlabelled.x))
    if experiment.method.needs("views"):
        inputs["views"] = [repr(augmentation(a)) for a in experiment.views]
    return inputs


def _sample(x: Tensor | Samples) -> list[np.ndarray]:
    """Some of the inputs, of samples for collate with their targets, as bytes."""
    return [raw(t) for t in (x.leaves(READ) if isinstance(x, Samples) else [x[:: max(len(x) // SAMPLED, 1)]])]


def _digest(*arrays: np.ndarray) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
