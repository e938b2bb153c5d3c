"""Methods with private parameters."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.objectives import CrossEntropy
from fedloom.personal import Body, Head


@methods.register
def fedper() -> Method:
    """The body is shared and averaged, each client keeps its own head; both are trained together.

    Arivazhagan et al. 2019. A client that never took part deploys the shared body with the initial head.
    """
    return Method("fedper", (CrossEntropy(),), personal=Head())


@methods.register
def lg_fedavg() -> Method:
    """The head is shared and averaged, each client keeps its own body. Liang et al. 2020."""
    return Method("lg_fedavg", (CrossEntropy(),), personal=Body())
