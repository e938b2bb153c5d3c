"""Computes decide how a block of clients is stepped: one by one in a live module, or all in one batched pass.

Change ``live`` for the reference behaviour, ``batched`` and ``lockstep`` for how clients are grouped, and ``cohort`` to
support another layer type in batched passes. Computes know no methods by name; they follow the parts' declarations.
"""

from __future__ import annotations

from functools import partial

from fedloom.base.ranges import Count
from fedloom.base.registry import Registry
from fedloom.rounds.engine import Compute, ComputeFactory
from fedloom.rounds.plan import ClientPlan

computes: Registry[ComputeFactory] = Registry("compute")


@computes.register
def auto() -> ComputeFactory:
    """Choose ``batched`` for plans that have a batched form, else ``live``.

    The choice depends on the plan alone, never on the number of cores, so that a run has the same bits everywhere.
    """
    return _batched


@computes.register
def live() -> ComputeFactory:
    """Step clients one after the other in one live module; the reference."""
    from fedloom.compute.live import Live

    return Live


@computes.register
def batched(*, shares: Count | None = None) -> ComputeFactory:
    """Step blocks of clients in one batched pass, equal to ``live`` up to rounding; falls back to ``live``.

    Plans that have no batched form (see ``reason_against_batched``) run live.

    Args:
        shares: the number of a round's blocks is a multiple of this, so that up to as many workers get equally many
            clients. With 1, one process steps a small cohort in a single pass. By default 4, and 1 on a GPU.
    """
    return _batched if shares is None else partial(_batched, shares=shares)


def _batched(plan: ClientPlan, shares: int | None = None) -> Compute:  # other processes import it by its name
    from fedloom.compute.batched import Batched
    from fedloom.compute.live import Live

    return Live(plan) if reason_against_batched(plan) else Batched(plan, shares)


def resolved(name: str, plan: ClientPlan) -> str:
    """The name of the compute that actually steps the plan; unlike the engine, it affects rounding."""
    name = "batched" if name == "auto" else name
    return "live" if name == "batched" and reason_against_batched(plan) else name


def reason_against_batched(plan: ClientPlan) -> str | None:
    """The reason why ``batched`` would run the plan live; None if it would not."""
    from fedloom.compute.batched import reason_against

    return next((reason for level in plan.levels if (reason := reason_against(level))), None)


def note(name: str, plan: ClientPlan) -> str | None:
    """A sentence for the user on why the named compute steps the plan live; None if there is nothing to say.

    For ``batched``, a user's choice, every reason is given; for ``auto``, only those in the structure of a small model.
    """
    from fedloom.compute.batched import reason_against_small_model

    if name == "batched":
        reason = reason_against_batched(plan)
    elif name == "auto":
        reason = next((reason for level in plan.levels if (reason := reason_against_small_model(level))), None)
    else:
        reason = None
    return reason and f"compute={name} stepped clients one by one: {reason}."
