"""Computes step a block of clients: in one live module, or many clients in one batched pass."""

from __future__ import annotations

from fedloom.core.engine import ComputeFactory
from fedloom.core.registry import Registry

computes: Registry[ComputeFactory] = Registry("compute")


@computes.register
def live() -> ComputeFactory:
    """Step one client after the other in one live module: the reference."""
    from fedloom.compute.live import Live

    return Live
