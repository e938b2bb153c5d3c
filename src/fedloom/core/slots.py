"""One registry of parts per slot."""

from __future__ import annotations

from fedloom.base.registry import Registry
from fedloom.core.parts import (
    Adaptation,
    Drift,
    Mixing,
    Part,
    Personal,
    ServerOptimizer,
    Term,
    Topology,
    Uplink,
    Weighting,
)

objectives: Registry[Term] = Registry("objective")
drifts: Registry[Drift] = Registry("drift")
personals: Registry[Personal] = Registry("personal")
adaptations: Registry[Adaptation] = Registry("adaptation")
mixings: Registry[Mixing] = Registry("mixing")
weightings: Registry[Weighting] = Registry("weighting")
servers: Registry[ServerOptimizer] = Registry("server")
topologies: Registry[Topology] = Registry("topology")
uplinks: Registry[Uplink] = Registry("uplink")

SLOTS: dict[str, Registry] = {
    "objective": objectives,
    "drift": drifts,
    "personal": personals,
    "adaptation": adaptations,
    "mixing": mixings,
    "weighting": weightings,
    "server": servers,
    "topology": topologies,
    "uplink": uplinks,
}
BASES: dict[str, type[Part]] = {
    "objective": Term,
    "drift": Drift,
    "personal": Personal,
    "adaptation": Adaptation,
    "mixing": Mixing,
    "weighting": Weighting,
    "server": ServerOptimizer,
    "topology": Topology,
    "uplink": Uplink,
}
SEVERAL = ("objective", "weighting", "uplink")  # slots that hold any number of parts, in order

drifts.register(name="none")(Drift)
personals.register(name="none")(Personal)
adaptations.register(name="none")(Adaptation)
mixings.register(name="by_samples")(Mixing)
servers.register(name="none")(ServerOptimizer)
topologies.register(name="none")(Topology)


def label(part: Part) -> str:
    """The registered name of a part, or that of a user's own loss, for messages and listings.

    >>> label(Drift()), label(Mixing())
    ('none', 'by_samples')
    """
    if title := getattr(part, "title", ""):  # of a loss that the user brought
        return title
    for slot, base in BASES.items():
        if isinstance(part, base):
            return SLOTS[slot].name_of(type(part)) or type(part).__name__.lower()
    return type(part).__name__.lower()


def hook_name(place: str, part: Part, hook: str) -> str:
    """A hook in messages, like ``server 'adam': step``."""
    return f"{place} {label(part)!r}: {hook}"
