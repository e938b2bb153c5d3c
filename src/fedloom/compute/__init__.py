"""How a block of clients is stepped: one live module, or many clients in one batched pass. Any engine takes any."""

from __future__ import annotations

from fedloom.core.engine import ComputeFactory
from fedloom.core.registry import Registry

computes: Registry[ComputeFactory] = Registry("compute")


@computes.register
def live() -> ComputeFactory:
    """Step one client after the other in one live module: the reference."""
    from fedloom.compute.live import Live

    return Live
