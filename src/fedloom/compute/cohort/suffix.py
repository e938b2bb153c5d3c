"""The layers of a network from the first one that is trained: what comes before them is constant during a round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import Parameter
from fedloom.compute.cohort.trace import LayerCall, Program

ROWS = 64  # samples of a client that pass the constant layers at once


def parted(program: Program, frozen: Collection[str]) -> tuple[Program, Program] | None:
    """The layers before the first trained one, and the others as a network of what the former return.

    None if the first layer is trained, or if trained layers read more than one value of those before.

    Args:
        program: the network.
        frozen: names of parameters that are not trained.
    """

    def trains(step: LayerCall) -> bool:
        own = (value for value in vars(step.layer).values() if isinstance(value, Parameter))
        return any(each.grad is not None and each.leaf.name not in frozen for each in own)

    first = next((place for place, step in enumerate(program.steps) if trains(step)), 0)
    before, rest = program.steps[:first], program.steps[first:]
    made = {step.output for step in rest}
    read = {number for step in rest for number in step.inputs} | set(program.outputs)
    if len(read - made) != 1 or not before:
        return None
    (cut,) = read - made
    moved = tuple(replace(step, inputs=tuple(0 if n == cut else n for n in step.inputs)) for step in rest)
    return replace(program, steps=before, outputs=(cut,)), replace(program, steps=moved)


def outputs(net: CohortNet, program: Program, x: Tensor) -> Tensor:
    """What a program of constant layers returns for the clients' samples: from [C, n, ...] to [C, n, ...]."""
    return torch.cat([net.forward(rows, program)[0] for rows in x.split(ROWS, 1)], 1)
