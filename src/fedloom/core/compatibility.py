"""Which parts of a method do not go together, and why; ``docs/combinations.py`` has the smallest case of each."""

from __future__ import annotations

import torch

from fedloom.base.errors import ConfigError, nearest
from fedloom.core.composition import Composition
from fedloom.core.context import NO_ROUND, Batch, Output, RoundInfo
from fedloom.core.hooks import overrides
from fedloom.core.parts import UPDATE, Adaptation, Drift, Mixing, Part, Reduce, Term, Topology, Uplink
from fedloom.core.slots import label
from fedloom.core.targets import CLASSES, ONE_CLASS


def check(method: Composition) -> None:
    """Raise a ``ConfigError`` about the first parts that do not go together; it names them."""
    _check_client_work(method)
    for place, part in method.parts.items() if method.pooled else ():
        if (isinstance(part, Uplink | Topology) and not part.is_identity) or getattr(part, "levels", ()):
            raise ConfigError(
                f"method {method.name!r} trains on pooled data, without clients for {place} {label(part)!r}."
            )
    if method.needs("target"):
        _check_target(method)
    kinds = {place: CLASSES if part.targets == ONE_CLASS else part.targets for place, part in method.parts.items()}
    declared = {kind: (place, method.parts[place]) for place, kind in kinds.items() if kind}
    if len(declared) > 1:
        (kind, (first_place, part)), (other_kind, (other_place, other_part)) = list(declared.items())[:2]
        raise ConfigError(
            f"{first_place} {label(part)!r} is defined for {kind}, but {other_place} {label(other_part)!r} for "
            f"{other_kind}; leave one of them out."
        )
    for uplink in method.uplink:
        _check_uplink(method, uplink)
    if method.needs("heard") and not overrides(method.topology, "heard"):
        raise ConfigError(
            f"{method.who_needs('heard')} reads models of other clients, but topology {label(method.topology)!r} sends "
            "a client one; set method.topology=cores."
        )
    if not method.topology.is_identity:
        _check_topology(method)
    for place, part in method.parts.items() if method.personal.levels else ():
        if part is not method.personal and (why := _why_not_with_levels(part, method)):
            raise ConfigError(
                f"{place} {label(part)!r} {why}, but with personal {label(method.personal)!r} clients train networks "
                "of different size."
            )


def _check_client_work(method: Composition) -> None:
    """Raise a ``ConfigError`` if parts ask for different models or losses in a client's steps."""
    adaptation, personal = f"adaptation {label(method.adaptation)!r}", f"personal {label(method.personal)!r}"
    if not any(overrides(term, "loss") for term in method.objective):
        raise ConfigError(
            f"method {method.name!r} has no term with a loss on the data; add CrossEntropy(), or "
            "cross_entropy to the list of objectives."
        )
    if method.is_paired and not method.adaptation.is_identity:
        raise ConfigError(f"{adaptation} fits one model, but with {personal} a client has two.")
    trained = adaptation if method.adaptation.trains else personal if method.is_paired else ""
    if trained and method.needs("model"):
        raise ConfigError(
            f"{method.who_needs('model')} evaluates the model on inputs of its own, but with {trained} a mini-batch is "
            "trained on another; leave one of them out."
        )
    with_logits = [term for term in method.objective if term.needs.received and not term.needs.features]
    if with_logits and method.adaptation.trains:
        raise ConfigError(
            f"objective {label(with_logits[0])!r} compares with the received model's logits, but {adaptation} trains "
            "on the logits of an adapted model."
        )
    for place, part in method.hooks["on_step"] if trained else ():
        raise ConfigError(
            f"{place.partition('.')[0]} {label(part)!r} inspects the model before every step, but with {trained} the "
            "step's loss is that of another model; leave one of them out."
        )
    for slot, part in method.parts.items() if method.shares_nothing else ():
        if _works_on_shared(part):
            raise ConfigError(f"{slot} {label(part)!r} works on shared parameters, but {personal} shares none.")
    for place, part in (*method.hooks["start"], *method.hooks["lessons"]) if method.needs("sgd") else ():
        raise ConfigError(
            f"{method.who_needs('sgd')} infers gradients from the way from the received model, but with "
            f"{place.partition('.')[0]} {label(part)!r} local steps start elsewhere; choose a drift like dynamic, "
            "or none."
        )
    for term in method.objective if method.mixing.weighs_losses else ():
        if _is_signed(term):
            raise ConfigError(
                f"mixing {label(method.mixing)!r} weights clients by losses of at least 0, but objective "
                f"{label(term)!r} is negative for good models; choose another of the two."
            )


def _check_target(method: Composition) -> None:
    """Raise a ``ConfigError`` if clients have no models that the server could evaluate on inputs of its own."""
    subject = f"{method.who_needs('target')} evaluates the clients' models on unlabelled inputs"
    if not method.predicts:
        raise ConfigError(f"{subject}, but method {method.name!r} trains no predictor.")
    if method.drift.update_kind == "other":
        raise ConfigError(
            f"{subject}, but clients with drift {label(method.drift)!r} upload something else; choose one whose "
            "updates lead to their models, like scaffold or dynamic."
        )


def _check_uplink(method: Composition, uplink: Uplink) -> None:
    """Raise a ``ConfigError`` if an uplink cannot cover a slice of the method."""
    subject = f"uplink {label(uplink)!r}"
    for slot in uplink.covered:
        if slot not in method.slots:
            raise ConfigError(f"{subject}: nothing called {slot!r} is uploaded; {nearest(slot, method.slots)}")
    missing = [slot for slot in method.boundable if slot not in uplink.covered]
    if "noise" in uplink.guarantees and uplink.covered and missing:
        raise ConfigError(f"{subject} has no bound for {missing[0]!r}; give one in bounds.")
    for place, part in method.parts.items():
        if isinstance(part, Uplink):
            continue
        other = f"{place} {label(part)!r}"
        single = part.needs.updates or part.needs.losses or Reduce.ALL in part.uploads.values()
        if "sums" in uplink.guarantees and single:
            raise ConfigError(f"{other} needs every client's own upload, but {subject} shows the server only sums.")
        if "noise" in uplink.guarantees:
            unbounded = [n for n in part.uploads if n != UPDATE and f"{place}/{n}" not in method.boundable]
            counts = isinstance(part, Mixing) and part.needs.label_counts
            if unbounded or part.needs.losses or counts:
                what = f"{unbounded[0]!r}" if unbounded else f"the client's {'classes' if counts else 'loss'}"
                raise ConfigError(f"{other} sends {what}, which has no bound that {subject} could protect.")
    if "sums" not in uplink.guarantees:
        return
    if not all(later.guarantees == {"sums"} for later in method.uplink[method.uplink.index(uplink) + 1 :]):
        raise ConfigError(f"{subject} must be the last uplink, since a later one could undo what it guarantees.")
    unequal = [] if method.mixing.is_uniform else [f"mixing {label(method.mixing)!r}"]
    if unequal := unequal + [f"weighting {label(part)!r}" for part in method.weighting]:
        raise ConfigError(
            f"{unequal[0]} does not give all clients of a cohort equal weight, as {subject} requires; choose "
            "method.mixing=uniform, without method.weighting."
        )


def _check_topology(method: Composition) -> None:
    """Raise a ``ConfigError`` if a part is defined for one model only."""
    topology, mixing = method.topology, f"mixing {label(method.mixing)!r}"
    subject = f"topology {label(topology)!r}"
    if method.personal.levels:
        raise ConfigError(
            f"personal {label(method.personal)!r} gives clients networks of different size, which {subject} cannot mix "
            "with each other."
        )
    if method.mixing.trusted or _counts_clients(method.mixing):
        raise ConfigError(
            f"{mixing} chooses among all clients, but with {subject} each model has receivers of its own; choose one "
            "that looks at the cohort alone, like by_samples, term or q_ffl."
        )
    for uplink in method.uplink:
        if "noise" in uplink.guarantees:
            raise ConfigError(
                f"uplink {label(uplink)!r} has noise for one sum over all clients, but with {subject} there are "
                "several in a round; leave one of them out."
            )
    if topology.home == "clients" and method.uplink:
        raise ConfigError(
            f"uplink {label(method.uplink[0])!r} changes what clients send to a server, but in {subject} they send "
            "whole models to each other; leave it out."
        )
    for place, part in method.parts.items():
        keeps = topology.mean in ("kept", "kept_by_all") or not overrides(topology, "between")  # B = I keeps them
        if part.mixed and not keeps:
            raise ConfigError(
                f"{place} {label(part)!r} relies on means over models that mixing them keeps, but {subject} does not "
                "keep them; choose an undirected graph."
            )
    if topology.chooses and (method.hooks["init_client"] or method.keeps_own):
        place, part = next(iter(method.hooks["init_client"]), ("personal", method.personal))
        raise ConfigError(
            f"{place} {label(part)!r} keeps something of its model at every client, who with {subject} may choose "
            "another one in the next round; leave one of them out."
        )


def _why_not_with_levels(part: Part, method: Composition) -> str:
    """Why a part does not work with clients of several levels, as a predicate of it; "" if it does."""
    personal = method.personal
    if isinstance(part, Adaptation) and not part.is_identity:
        return "adapts one network to every client"
    if part.needs.updates or part.needs.target or UPDATE in part.uploads:
        return "compares all clients' models as vectors of one length"
    if isinstance(part, Drift) and part.update_kind == "normalised":
        return "scales all parameters by the steps of the whole cohort"
    if overrides(part, "receive"):
        return "changes sums of one length at the server"
    if (part.uploads or part.downloads) and not part.fits_all:
        return "exchanges more than models with clients"
    several = any(any(personal.exit_weights(level)) for level in range(len(personal.levels)))
    if several and (part.needs.features or part.needs.twin):
        return "uses more than the logits, and so cannot be evaluated at several exits"
    return ""


def _works_on_shared(part: Part) -> bool:
    """Whether a part works on shared parameters, or on updates of them."""
    if isinstance(part, Drift | Uplink) and not part.is_identity:
        return True
    acts = any(overrides(part, hook) for hook in ("broadcast", "grad", "prox", "step", "refine"))
    return acts or part.needs.updates or part.needs.received


def _is_signed(term: Term) -> bool:
    """Whether a loss is negative where the right classes are certain, to a teacher, too; by trial."""
    y, logits, facts = torch.arange(3), 100 * torch.eye(3), NO_ROUND.facts._replace(classes=3)
    try:
        ctx = NO_ROUND._replace(facts=facts, down=term.init_server(torch.zeros(1), facts))
        value = term.loss(Output(logits, teacher=logits), Batch(torch.eye(3), y), ctx)
    except Exception:  # it needs more than outputs and classes
        return False
    return bool((value < 0).any())


def _counts_clients(mixing: Mixing) -> bool:
    """Whether a policy has an entry for each of the K clients, by their numbers; by trial."""
    try:
        mixing.coefficients({}, RoundInfo.of_cohort([2**62, 2**62 + 1], [1, 1], 2, [1.0, 1.0]))
    except IndexError:
        return True
    except Exception:  # it needs more than losses
        return False
    return False
