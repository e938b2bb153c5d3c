"""A federated method as data: a composition of parts that go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.applications import notebook_html
from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, in_words
from fedloom.base.settings import short_repr
from fedloom.core import compatibility
from fedloom.core.composition import Composition
from fedloom.core.hooks import check_declarations, overrides
from fedloom.core.parts import Part, Term, Use
from fedloom.core.slots import BASES, SEVERAL, SLOTS, label


@dataclass(frozen=True)
class Method(Composition):
    """A composition of parts; every slot but the objective defaults to its identity, which makes the method FedAvg.

    Args:
        name: the name in tables and plots.
        objective: the terms whose sum is the local loss.
        drift: the correction of client drift.
        personal: personalisation: which parameters are private.
        adaptation: how a model is adapted to a client before it is used.
        mixing: how the mixing coefficients p are chosen.
        weighting: factors of clients' shares beside p, such as those of stale work.
        server: the server optimiser.
        topology: how many models there are, who receives which, and how they are mixed with each other.
        uplink: transforms, in order, of everything that leaves a client.
        pooled: train on the pooled data of all clients (centralised training, the papers' oracle); no communication.
        citation: BibTeX of the paper, or its keys in ``citations.bib``.

    Raises:
        ConfigError: if two parts are incompatible; the message names both.
    """

    def __post_init__(self) -> None:
        self._check_slots()
        compatibility.check(self)
        if self.is_paired:
            self._check_scalars()

    def __repr__(self) -> str:
        """The parts that differ from FedAvg's.

        >>> from fedloom.methods import make
        >>> make("fedprox", mu=0.1)
        Method(name='fedprox', objective=(CrossEntropy(), Proximal(mu=0.1)))
        """
        return short_repr(self)

    def _repr_html_(self) -> str | None:
        return notebook_html(self)

    def _check_slots(self) -> None:
        """Raise a ``ConfigError`` if a slot holds anything but its parts; a list of parts becomes a tuple."""
        if not isinstance(self.name, str):
            raise ConfigError(f"the name of a method is text, not {self.name!r:.60}.")
        for slot in SLOTS:
            filled, kind = getattr(self, slot), BASES[slot]
            if slot in SEVERAL:
                filled = tuple(filled) if isinstance(filled, list | tuple) else (filled,)
                object.__setattr__(self, slot, filled)
            for part in filled if slot in SEVERAL else (filled,):
                if isinstance(part, type) and issubclass(part, kind):
                    raise ConfigError(f"{slot} is the class {part.__name__}; give an instance, {part.__name__}(...).")
                if not isinstance(part, kind):
                    raise ConfigError(
                        f"{slot} is {in_words(part)}, but it must be a {kind.__name__} of fedloom.core.parts."
                    )
                if type(part) is not kind:
                    check_declarations(f"{slot} {label(part)!r}", part)

    def with_loss(self, term: Term) -> Method:
        """The method with another loss on the data in place of the cross entropy; its name says so.

        >>> from fedloom.methods import make
        >>> from fedloom.parts.objectives import SquaredError
        >>> make("fedprox").with_loss(SquaredError()).name
        'fedprox+squared_error'

        Raises:
            ConfigError: if the method has no cross entropy because it is defined by a loss of its own.
        """
        other_terms = [objective_term for objective_term in self.objective if not objective_term.is_cross_entropy]
        if len(other_terms) == len(self.objective):
            raise ConfigError(
                f"method {self.name!r} has a loss of its own ({', '.join(map(label, other_terms))}) instead of the "
                "cross entropy, so loss= cannot replace it; choose another method."
            )
        method = replace(self, objective=(term, *other_terms))
        return replace(method, name=self.name + method.changes(self))

    def changes(self, base: Method) -> str:
        """The parts in which the method differs from another one, as a suffix of its name.

        Added parts follow a plus, in the order of the slots; parts removed without a replacement follow a minus. A
        cross entropy that another loss replaces is not mentioned.

        >>> from fedloom.methods import make
        >>> from fedloom.parts.server import Adam
        >>> fedavg = make("fedavg")
        >>> fedadam = replace(fedavg, server=Adam())
        >>> fedadam.changes(fedavg), fedavg.changes(fedadam)
        ('+adam', '-adam')
        """
        text = ""
        for slot in SLOTS:
            terms: list[tuple[Part, ...]] = []
            for method in (base, self):
                filled = getattr(method, slot)
                terms.append(filled if isinstance(filled, tuple) else (filled,))
            before, now = [[*map(label, parts)] for parts in terms]
            removed, added = [part for part in before if part not in now], [part for part in now if part not in before]
            if added and any(overrides(part, "loss") for part in terms[1] if label(part) in added):
                removed = [part for part in removed if part != "cross_entropy"]
            if slot in SEVERAL or added == ["none"]:
                text += "".join(f"-{part}" for part in removed)
            text += "".join(f"+{part}" for part in added if part != "none")
        return text + "+pooled" * (self.pooled and not base.pooled) + "-pooled" * (base.pooled and not self.pooled)

    def _check_scalars(self) -> None:
        """Raise a ``ConfigError`` if the scalars with which a paired part starts are no numbers in [0, 1]."""
        personal, who = self.personal, f"personal {label(self.personal)!r}"
        extras = self.extras.tolist()
        if not all(map(_in_unit_interval, extras)):
            raise ConfigError(f"{who}: private_start adds {extras} to v, but these must be numbers in [0, 1].")
        for values in {tuple(extras), (0.0,) * len(extras), (1.0,) * len(extras)}:  # training may move them anywhere
            state = {"private": torch.tensor((0.0, *values)), "buffers": torch.zeros(0)}
            uses: Any = personal.uses(0, lambda state=state: state, 0)
            if not (isinstance(uses, tuple) and uses and all(isinstance(use, Use) for use in uses)):
                raise ConfigError(
                    f"{who}: uses returned {uses!r:.60}, but it must be a tuple of Use(...), like (Use(lam=1.0),)."
                )
            for at in (use.lam for use in uses if not _in_unit_interval(use.lam)):
                text = f"{at!r:.60}" + f" for the scalars {list(values)}" * bool(values)
                raise ConfigError(f"{who}: uses returned λ = {text}, but it must be a number in [0, 1].")

    def citations(self) -> Iterator[str]:
        """BibTeX entries of the method and its parts, without repetitions."""
        entries: dict[str, None] = {}
        for entry in (self.citation, *(part.citation for part in self.parts.values())):
            if entry:
                entries.setdefault(bibtex(entry))
        yield from entries


def _in_unit_interval(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
