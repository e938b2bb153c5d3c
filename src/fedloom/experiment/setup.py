"""Setup of a run: the model is initialised and tried on the data, and the data are moved to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from fedloom.base import rng
from fedloom.base.errors import ConfigError, as_config_error, first_line, in_words, user_stacklevel
from fedloom.core.federation import Arrays, Federation, Split, Unlabelled
from fedloom.core.hooks import overrides
from fedloom.core.method import Method
from fedloom.core.model_traits import APART
from fedloom.core.parts import Term
from fedloom.core.samples import Samples, moved
from fedloom.core.server_data import Augment, ServerData
from fedloom.core.slots import label
from fedloom.core.targets import (
    CLASSES,
    NUMBERS,
    ONE_CLASS,
    STRUCTURES,
    TRUTHS,
    TargetKind,
    are_numbers,
    kind_of,
    require_one_class,
)
from fedloom.data.augment import pipeline
from fedloom.experiment.conventions import extreme_rows
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.runtime import reason_against_bf16
from fedloom.metrics import lookup
from fedloom.metrics.prediction import r2
from fedloom.models import Copies, Several, Wrapped, adapters
from fedloom.models.layers import with_safe_convolutions
from fedloom.rounds import example_privacy
from fedloom.rounds.plan import ClientPlan

OURS = {"fedloom", "torch"}
BY_CLASS = ("label_counts", "teacher")
"""What gives parts one number for each class of the data."""
USUAL = {CLASSES: "cross_entropy", TRUTHS: "binary_cross_entropy", NUMBERS: "squared_error"}


def initial_model(factory: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> nn.Module:
    """A factory's module, freshly initialised: the same in runs of all kinds with this seed.

    Raises:
        ConfigError: if the factory fails, or does not return a module, or returns one that cannot be trained here.
    """
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "model")
        with as_config_error("the model's function, called without arguments, fails with"):
            model = factory()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model's function returns {in_words(model)}; it must return a torch module.")
        _trainable(model)
        return with_safe_convolutions(model).to(dtype)


def _trainable(model: nn.Module) -> None:
    """Raise ``ConfigError`` for compiled modules, parameters without real values, and what cannot be copied."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"layer {name!r} of the model" if name else "the model"
            raise ConfigError(f"{which} is compiled by torch.jit; give the original module.")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ConfigError(
                f"the model's {name!r} has no shape yet; call the model on a sample before it is returned, or give its "
                "lazy layers their sizes."
            )
        if value.is_meta:
            raise ConfigError(f"the model's {name!r} is on the meta device, without values; make it on the CPU.")
        if value.is_complex():  # which a cast to the run's dtype would halve
            raise ConfigError(
                f"the model's {name!r} holds complex numbers; keep their real and imaginary parts, like "
                "torch.view_as_real, and join them in forward by torch.view_as_complex."
            )
    adapters.copy_module(model)  # as computes do


def make_plan(experiment: Experiment, federation: Federation, device: str) -> ClientPlan:
    """The plan of an experiment, with its model initialised from the seed and tried on the data.

    Raises:
        ConfigError: if the model does not fit the data, the method's split into shared and private parameters leaves
            one side empty on this model, latent sizes differ, or the device does not support the requested precision.
    """
    if experiment.local.precision == "bf16" and (reason := reason_against_bf16(device)):
        raise ConfigError(f"local.precision=bf16: {reason}; choose local.precision=full.")
    arrays, dtype, teacher = federation.train.arrays, getattr(torch, experiment.dtype), experiment.teacher
    if isinstance(arrays.x, Samples):
        _structures(experiment, arrays)
    model = initial_model(experiment.model, experiment.seed, dtype)
    if experiment.init is not None:
        from fedloom.experiment.teacher import warm_start

        warm_start(model, experiment.init, federation)
    if teacher is not None:
        from fedloom.experiment.teacher import load_teacher

        teacher = load_teacher(teacher, federation, dtype, device)
    data, hostile = federation.train.first(federation.seen), experiment.hostile
    attack = experiment.attack if len(hostile) else None
    if attack is not None:
        data = attack.poison(data, hostile, experiment.seed)
    plan = ClientPlan.of(model, experiment.method, data, experiment.local, experiment.seed, device)
    validates = experiment.method.topology.reads_losses and len(federation.validation.index.rows) > 0
    validates = validates or experiment.method.needs("validation")
    plan = replace(
        plan,
        theta0=plan.theta0.to(device),
        buffers0=plan.buffers0.to(device),
        validation=federation.validation.first(federation.seen) if validates else None,
        report_models=bool({"average", "cohort"} & set(experiment.evaluation.what)),
        augment=pipeline(experiment.augment, data.arrays) if experiment.augment else None,
        make=_other_initialisations(experiment),
        rounds=experiment.rounds,
        cohort=1 if experiment.method.pooled else experiment.cohort_size,
        expected_cohort=experiment.expected_cohort,
        teacher=teacher,
        attack=attack,
        hostile=frozenset(hostile.tolist()),
        client_local=experiment.own_local,
    )
    for part in experiment.method.parts.values():
        part.check(plan.local, plan.facts)
    for client_plan in (plan, *(plan.at(client) for client in plan.client_local)):
        _ = client_plan.rates  # raises for names that begin no parameter
        _momentum(client_plan)
    _private(experiment.method, plan)
    example_privacy.check(plan)
    _latent(experiment.method, model)
    for level in plan.levels:
        require_features(experiment.method, level.model)
    return replace(plan, targets=_target_kind(experiment, plan, federation))


def _target_kind(experiment: Experiment, plan: ClientPlan, federation: Federation) -> TargetKind | None:
    """The kind of targets, after passes of the model on two samples; None if the method trains no predictor.

    Raises:
        ConfigError: if a pass fails, or outputs, targets and objective do not fit together.
    """
    method, model, arrays = experiment.method, plan.model, federation.train.arrays
    sample, y = moved(arrays.batch(torch.arange(min(len(arrays), 2))), "cpu")
    tokens = _extreme_tokens(federation)
    try:
        with torch.no_grad():
            out = model.eval()(sample)
            if len(tokens):
                model(tokens)
    except ConfigError:  # of a head that was cut off in the wrong place
        raise
    except Exception as error:
        inputs = "that collate returns" if isinstance(arrays.x, Samples) else f"of shape {tuple(sample.shape[1:])}"
        message = f"the model does not take inputs {inputs}: {first_line(error)}"
        source = federation.provenance.get("source", {})
        if columns := source.get("columns"):
            message += f"; the table has {len(columns)} columns of inputs, one for each category of a text"
        raise ConfigError(f"{message}{_hint(error, tokens, source.get('vocabulary', 0))}") from error
    if not (isinstance(out, Tensor) or arrays.has_structures):
        raise ConfigError(f"the model returns {in_words(out)}; return the logits alone.")
    _levels(plan, sample)
    for level in plan.levels:
        if isinstance(level.model, Wrapped) or method.needs("features"):
            adapters.check(level.model, sample)
    if method.predicts and not _of_the_library(model):
        _traits(plan)
    _auxiliary(method, out)
    if not method.predicts:
        return None
    if arrays.has_structures:
        for term in method.data_terms:
            try_loss(term, out, y)
        return STRUCTURES
    kind = check_targets(method, arrays, out, experiment.evaluation.metrics)
    if kind == TRUTHS and ends_in_sigmoid(model, sample):
        warnings.warn(
            "the model returns probabilities, but binary cross entropy and metrics apply a sigmoid of their own, so "
            "that every sample counts as positive; return the logits, without the sigmoid at the end.",
            stacklevel=user_stacklevel(),
        )
    return kind


def ends_in_sigmoid(model: nn.Module, x: Tensor) -> bool:
    """Whether the last operation of a model, but for those that change the shape alone, is a sigmoid.

    >>> ends_in_sigmoid(nn.Sequential(nn.Linear(2, 1), nn.Sigmoid(), nn.Flatten(0)), torch.zeros(3, 2))
    True
    """
    with torch.enable_grad():
        node = model(x).grad_fn
    while node is not None and node.name().startswith(("View", "Squeeze", "Unsqueeze", "Select", "UnsafeView")):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")


def _structures(experiment: Experiment, arrays: Arrays) -> None:
    """Raise ``ConfigError`` for what needs rows of one tensor, where collate makes mini-batches.

    What these checks miss asks the samples for what only tensors have, and the samples refuse it.
    """
    with as_config_error("collate fails on two samples:"):
        arrays.batch(torch.arange(min(len(arrays), 2)))
    method, local = experiment.method, experiment.local
    rows = {
        "local.dp_clip": local.dp_clip is not None,
        "local.micro_batch": local.micro_batch is not None,
        f"adaptation {label(method.adaptation)!r}": not method.adaptation.is_identity,
        "a start that learns from samples": bool(method.hooks["start"]),
        **{method.who_needs(need): True for need in ("generator", "teacher", "target", "public") if method.needs(need)},
    }
    classes = {
        **{method.who_needs(need): True for need in ("label_counts", "common_classes") if method.needs(need)},
        **{f"{place} {label(part)!r}": True for place, part in method.parts.items() if part.targets is not None},
    }
    refusals = rows | (classes if arrays.has_structures else {})
    if who := next((who for who, applies in refusals.items() if applies), None):
        what = "samples by themselves or in rows" if who in rows else "classes or numbers"
        remedy = "leave it out" if who in rows else "give a loss of your own, with loss=function(outputs, targets)"
        raise ConfigError(f"{who} takes {what}, but collate puts samples together into structures; {remedy}.")


def _of_the_library(model: nn.Module) -> bool:
    """Whether a network is one of ours, all of which compute each sample's outputs from its parameters and buffers."""
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return type(model).__module__.startswith("fedloom.models.") and not isinstance(model, Wrapped) and kinds <= OURS


def _traits(plan: ClientPlan) -> None:
    """Raise ``ConfigError`` for a model whose outputs depend on other samples, or on earlier passes."""
    if memory := plan.traits.memory:
        raise ConfigError(
            f"the model's forward pass changes {memory}, which is not part of the model that is sent: what one client "
            "did would change the next one's passes; keep it in a stored buffer of floats, like "
            "self.register_buffer('passes', torch.zeros(())), or compute it anew in every pass."
        )
    if plan.traits.mixes:
        raise ConfigError(
            "the model's outputs for a sample depend on the others of its batch even in evaluation, so that results "
            f"would depend on evaluation.batch_size; {APART}."
        )


def _extreme_tokens(federation: Federation) -> Tensor:
    """The samples with the least and the greatest number of each set of inputs [M, ...]; none of real numbers."""
    arrays = (federation.train.arrays, federation.validation.arrays, federation.held_out.arrays, federation.test)
    sets = [
        source.x for source in (*arrays, federation.unlabelled) if source is not None and isinstance(source.x, Tensor)
    ]
    rows = extreme_rows(list({id(x): x for x in sets}.values()))
    return torch.stack(rows) if rows else torch.empty(0)


def _hint(error: Exception, tokens: Tensor, size: int) -> str:
    """What to do if a model fails on inputs that are whole numbers, such as these, of a vocabulary of some size."""
    if not len(tokens):
        return ""
    least, greatest = int(tokens.min()), int(tokens.max())
    if not isinstance(error, IndexError):
        return "; whole numbers are taken as tokens: take a model of tokens, like stacked_lstm, or give float32"
    if least < 0:
        return f"; tokens are numbered from 0, but the data have {least}"
    vocabulary = max(greatest + 1, size)
    return (
        f"; the data have tokens up to {greatest}: give the model a vocabulary of {vocabulary}, "
        f"model.vocabulary={vocabulary}"
    )


def make_server_data(experiment: Experiment, plan: ClientPlan, federation: Federation) -> ServerData | None:
    """The server's unlabelled data, if some part of the method learns from them, or sends them."""
    if federation.unlabelled is None or not experiment.method.uses_unlabelled:
        return None
    views = experiment.method.needs("views")
    change = pipeline(experiment.views, federation.train.arrays) if views else None
    return server_data(plan, federation.unlabelled.x, change)


def server_data(plan: ClientPlan, inputs: Tensor, change: Augment | None = None) -> ServerData:
    """Unlabelled inputs [M, ...] and the plan's model, as parts at the server see them."""
    return ServerData(plan.model, plan.layout, plan.theta0, plan.buffers0, inputs, plan.seed, change)


def _other_initialisations(experiment: Experiment) -> Callable[[], nn.Module] | None:
    """The factory of models with other initial parameters; None if the experiment has one module."""
    if not isinstance(experiment.model, Copies):
        return experiment.model
    if experiment.method.draws_models:
        raise ConfigError(
            f"personal {label(experiment.method.personal)!r} starts from another initialisation of the model than the "
            "given module; pass a function that makes a module, like lambda: Net()."
        )
    return None


def check_targets(method: Method, arrays: Arrays, out: Tensor, metrics: Sequence[str] = ()) -> TargetKind:
    """The kind of targets, if objective, targets and the model's outputs fit together."""
    y, targets = arrays.y, method.targets
    binary = are_numbers(y) and bool(((y == 0) | (y == 1)).all())
    if not fits(targets, y):
        place, part = next((place, part) for place, part in method.parts.items() if part.targets)
        usual = USUAL[TRUTHS if binary else NUMBERS if are_numbers(y) else CLASSES]
        raise ConfigError(
            f"{place.partition('.')[0]} {label(part)!r} compares outputs with {targets}, but the targets of these data "
            f"are {_targets_in_words(y, targets)}; choose loss={usual!r} in Python, or method.objective=[{usual}]"
            f"{_other_form(y, targets)}."
        )
    if method.needs("label_counts") and are_numbers(y):
        raise ConfigError(f"{method.who_needs('label_counts')} needs classes, but these targets are numbers.")
    for place, part in method.parts.items():
        if part.targets == ONE_CLASS:
            require_one_class(f"{place.partition('.')[0]} {label(part)!r}", y)
    kind = kind_of(out, y, targets)
    if kind == CLASSES and out.ndim != y.ndim + 1:
        prediction = "one class" if out.ndim == 2 else f"a class at each of {list(out.shape[1:-1])} places"
        tokens = out.ndim == arrays.x.ndim == y.ndim == 2 and not arrays.x.is_floating_point()
        every = "; model=stacked_lstm with model.positions=every predicts one at each position" if tokens else ""
        raise ConfigError(
            f"the model predicts {prediction}, but each sample has labels of shape {list(y.shape[1:])}{every}."
        )
    if kind == CLASSES and out.shape[:-1] != y[: len(out)].shape:
        shape = [*y.shape[1:], arrays.classes]
        raise ConfigError(
            f"the model returns {list(out.shape[1:])} for labels of shape {list(y.shape[1:])}, but it must return "
            f"{shape}, with the classes last; move them there, like logits.movedim(1, -1)."
        )
    if kind == CLASSES and out.shape[-1] < arrays.classes:
        other_loss = (
            f"loss={USUAL[TRUTHS]!r} in Python, or method.objective=[{USUAL[TRUTHS]}], takes one for two classes"
        )
        advice = other_loss if out.shape[-1] == 1 and arrays.classes == 2 else "give it one for each class"
        has = f"the model has {out.shape[-1]} outputs, but the data have {arrays.classes} classes"
        raise ConfigError(f"{has}; {advice}.")
    by_class = next((need for need in BY_CLASS if method.needs(need)), None)
    if kind == CLASSES and by_class and out.shape[-1] != arrays.classes:
        raise ConfigError(
            f"{method.who_needs(by_class)} needs one output for each class, but the model has {out.shape[-1]} "
            f"outputs for {arrays.classes} classes; give it as many."
        )
    if kind != CLASSES and out[:1].numel() != y[:1].numel() and not (kind == NUMBERS and compares(method, metrics)):
        hint = "; a loss of your own may compare them if evaluation.metrics are functions of outputs of your own, too"
        advice = hint if kind == NUMBERS and compares(method, ()) else ""
        raise ConfigError(
            f"the model has {out[:1].numel()} outputs, but each sample has {y[:1].numel()} targets{advice}."
        )
    if kind == TRUTHS and not fits(TRUTHS, y):
        raise ConfigError(f"the model has 1 output, but the data have {arrays.classes} classes.")
    for term in method.objective:
        if term.has_test_loss():
            try_loss(term, out, y[: len(out)].to(out.device))
    if kind == CLASSES and probabilities(out) and any(term.is_cross_entropy for term in method.objective):
        warnings.warn(
            "the model returns probabilities, but cross entropy applies a softmax of its own; return the logits, or "
            "training will be slow and its gradients small.",
            stacklevel=user_stacklevel(),
        )
    return kind


def probabilities(out: Tensor) -> bool:
    """Whether every row of outputs [..., C] is a distribution over more than one class, as after a softmax.

    >>> probabilities(torch.tensor([[0.2, 0.8], [0.5, 0.5]])), probabilities(torch.tensor([[0.2, 0.8], [0.5, 1.5]]))
    (True, False)
    """
    sums = out.double().sum(-1)
    return out.shape[-1] > 1 and bool((out >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def compares(method: Method, metrics: Sequence[str]) -> bool:
    """Whether all losses and metrics are the user's own functions, which may match outputs and targets in their way."""
    from fedloom.parts.objectives.custom import Loss  # few runs have one

    entries = [lookup(name) for name in metrics]
    has_own_metrics = all(metric.function not in (None, r2) and metric.of == "outputs" for metric in entries)
    return has_own_metrics and all(isinstance(term, Loss) for term in method.data_terms)


def fits(targets: TargetKind | None, y: Tensor) -> bool:
    """Whether targets are of the kind that an objective compares outputs with.

    >>> fits("truth values", torch.tensor([0, 1])), fits("numbers", torch.tensor([0, 1])), fits(None, torch.ones(1))
    (True, False, True)
    """
    if targets == TRUTHS:
        return bool(((y >= 0) & (y <= 1)).all())
    return targets is None or are_numbers(y) == (targets == NUMBERS)


def try_loss(term: Term, out: Any, y: Any) -> None:
    """Call a term on two samples.

    Raises:
        ConfigError: if it fails, or returns anything but a loss per sample or one for all.
    """
    about = f"outputs {_form(out)} and targets {_form(y)}"
    name = f"objective {label(term)!r}"
    with as_config_error(f"{name} fails on {about}:"), torch.enable_grad():
        outputs = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), out)
        value = term.test_loss(outputs, y)
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or (value.ndim and isinstance(y, Tensor) and len(value) != len(y))
    ):
        description = f"{_type(value)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"{name} returns {description} for {about}; it must return a tensor, one loss per sample or for all."
        )
    if not value.requires_grad:
        raise ConfigError(f"{name} cannot be differentiated; compute it from the outputs by operations of PyTorch.")


def _form(value: Any) -> str:
    return f"{list(value.shape)} ({_type(value)})" if isinstance(value, Tensor) else in_words(value)


def _type(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _other_form(y: Tensor, targets: TargetKind | None) -> str:
    """What else to do with floats that may be meant as classes, and whole numbers that may be meant as numbers.

    >>> _other_form(torch.tensor([0.0, 2.0]), "classes"), _other_form(torch.eye(2), "classes")
    ('; or give class numbers as integers', '; or give class numbers, the argmax of each row')
    >>> _other_form(torch.tensor([63, 70]), "numbers")
    '; or give the numbers as floats, like 63.0, since whole numbers are classes'
    """
    if targets == NUMBERS and not are_numbers(y):
        return f"; or give the numbers as floats, like {float(y.flatten()[0])}, since whole numbers are classes"
    if targets != CLASSES or not are_numbers(y) or bool((y != y.round()).any() or (y < 0).any()):
        return ""
    if y.ndim == 1:
        return "; or give class numbers as integers"
    return "; or give class numbers, the argmax of each row" if bool((y.flatten(1).sum(1) == 1).all()) else ""


def _targets_in_words(y: Tensor, targets: TargetKind | None) -> str:
    """Targets as text.

    >>> _targets_in_words(torch.tensor([0, 4]), "numbers"), _targets_in_words(torch.tensor([0.5, -1.5]), "truth values")
    ('classes', 'numbers from -1.5 to 0.5')
    """
    kind = "numbers" if are_numbers(y) else "classes"
    return f"{kind} from {float(y.min()):g} to {float(y.max()):g}" if targets == TRUTHS else kind


def require_features(method: Method, model: nn.Module, learnt: bool = True) -> None:
    """Check that a model has the features that the parts of a method need.

    Args:
        method: the method.
        model: its model.
        learnt: whether the model is trained through an adaptation that can train it.

    Raises:
        ConfigError: if it does not separate them from a head, or training goes through an adaptation of features that
            have no parameters.
    """
    if method.needs("features") and not (hasattr(model, "features") and hasattr(model, "head")):
        raise ConfigError(
            f"{method.who_needs('features')} needs the model's features, but {type(model).__name__} has no "
            f"features(x) and head; {adapters.remedy(model)}"
        )
    is_trainable = any(p.requires_grad and not name.startswith("head.") for name, p in model.named_parameters())
    if learnt and method.adaptation.trains and method.adaptation.needs.features and not is_trainable:
        raise ConfigError(
            f"adaptation {label(method.adaptation)!r} trains the features before the head, but "
            f"{type(model).__name__} has no parameters there; choose a model with layers before its head, like mlp."
        )


def _levels(plan: ClientPlan, sample: Tensor) -> None:
    """Try the networks of all levels on a sample."""
    if isinstance(plan.model, Several) and not plan.has_levels:
        raise ConfigError(
            f"the model is a list of networks, of which method {plan.method.name!r} would train the first alone; set "
            "personal=Architectures(count) in the method, or give run() a Python list of models."
        )
    widths = set[int]()
    sends_features = any(part.needs.features and part.uploads for part in plan.method.parts.values())
    for level in plan.levels if plan.has_levels else ():
        assert level.submodel is not None
        who = f"personal {label(plan.method.personal)!r}"
        with as_config_error(f"{who} cannot make the network {level.submodel.name!r} of this model:"), torch.no_grad():
            level.model.to("cpu").eval()(sample)
            if sends_features:
                widths.add(level.model.features(sample).flatten(1).shape[1])  # pyright: ignore[reportCallIssue]
    if len(widths) > 1:
        raise ConfigError(
            f"{plan.method.who_needs('features')} compares features of all clients, but their networks have "
            f"{', '.join(map(str, sorted(widths)))} of them; give all networks features of one length."
        )


def _latent(method: Method, model: nn.Module) -> None:
    """Raise ``ConfigError`` if a part's latent size differs from the model's."""
    has = getattr(model, "latent", None)
    for place, part in method.parts.items():
        wants = getattr(part, "latent", None)
        if wants is not None and has is not None and wants != has:
            raise ConfigError(
                f"{place} {label(part)!r} draws latent vectors of length {wants}, but the model's have {has}; "
                "give both the same latent."
            )


def _auxiliary(method: Method, out: Tensor) -> None:
    """Raise ``ConfigError`` if a part draws classes for an auxiliary classifier that the discriminator lacks."""
    for place, part in method.parts.items():
        if getattr(part, "auxiliary", "own") != "own" and out.ndim == 1:
            raise ConfigError(
                f"{place} {label(part)!r} with auxiliary={part.auxiliary} draws classes for an auxiliary classifier, "  # type: ignore[attr-defined]
                "which this discriminator lacks; choose model=acgan, or auxiliary=own."
            )


def _momentum(plan: ClientPlan) -> None:
    """Raise a ``ConfigError`` if a part keeps the momentum of local steps that have none."""
    if plan.method.keep_momentum and not (plan.memory and plan.local.momentum):
        raise ConfigError(
            f"{plan.method.who_needs('momentum')} keeps the momentum of local steps, but there are steps without; set "
            "local.momentum at all clients, or leave out the personal part whose steps are plain."
        )


def _private(method: Method, plan: ClientPlan) -> None:
    """Raise ``ConfigError`` if the split leaves no shared or no private parameters on this model."""
    shared, total = plan.layout.shared_size, plan.layout.size
    if overrides(method.personal, "is_private") and shared == total:
        raise ConfigError(
            f"personal {label(method.personal)!r} keeps no parameter of this model private; "
            "the head consists of the parameters whose names begin with 'head.', "
            "normalisation layers are recognised by their type (mlp has some with model.norm=batch), and low-rank "
            "adapters come with "
            f"model=transformers model.lora=8{_or_wrap(plan)}."
        )
    if not shared and not method.shares_nothing:
        raise ConfigError(
            f"personal {label(method.personal)!r} shares no parameter of this model; "
            f"the head consists of the parameters whose names begin with 'head.'{_or_wrap(plan)}."
        )


def _or_wrap(plan: ClientPlan) -> str:
    """The remedy for a model without a head."""
    return "" if hasattr(plan.model, "head") else f"; to give a module a head, {adapters.remedy(plan.model)[:-1]}"


def to_device(federation: Federation, dtype: torch.dtype, device: str) -> Federation:
    """The federation with its arrays in the run's dtype and on its device; arrays that already fit are not copied."""
    moved_tensors: dict[int, Any] = {}
    moved_arrays: dict[int, Arrays] = {}

    def to(t: Any) -> Any:
        if id(t) not in moved_tensors:
            moved_tensors[id(t)] = t.to(device, dtype) if t.is_floating_point() else t.to(device)
        return moved_tensors[id(t)]

    def place(arrays: Arrays) -> Arrays:
        if id(arrays) not in moved_arrays:
            x, y = to(arrays.x), to(arrays.y)
            same = x is arrays.x and y is arrays.y
            moved_arrays[id(arrays)] = arrays if same else replace(arrays, x=x, y=y)
        return moved_arrays[id(arrays)]

    def split(old: Split) -> Split:
        return Split(place(old.arrays), old.index, None if old.relabel is None else to(old.relabel))

    return replace(
        federation,
        train=split(federation.train),
        validation=split(federation.validation),
        held_out=split(federation.held_out),
        test=place(federation.test),
        unlabelled=None if federation.unlabelled is None else Unlabelled(to(federation.unlabelled.x)),
    )
