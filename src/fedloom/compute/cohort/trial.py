"""The trial of a cohort: its outputs and gradients against those of the module, before it trains anything."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.base import fork_safety
from fedloom.base.errors import first_line
from fedloom.compute.cohort.layers import Unsupported, dropout_draws
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.trace import ChosenOutputs, Outputs
from fedloom.core.dropout import keyed
from fedloom.core.layout import Layout, LiveModule

ROWS = (2, 1)  # of each client
TOLERANCE, LEAST = 1e-7, 1e-6  # of errors, and the smallest scale that they are compared with
PERIOD = 4099  # of the noise on parameters


def trial_reason(model: nn.Module, outputs: Outputs, samples: Tensor) -> str | None:
    """The reason why a model's cohort form cannot be trusted; None if it agrees with the module on a few samples.

    Clients with different parameters and numbers of rows are compared in float64, in training mode and with the same
    draws of dropout. That takes a backward pass, which a forked child runs where it would spoil this process.
    """
    trial = partial(_reason, model, outputs, samples)
    on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers(), samples))
    if not (on_cpu and fork_safety.backward_spoils()):
        return trial()
    try:
        return fork_safety.run_in_child(trial)
    except EOFError:
        return "the model's batched form cannot be tried (the process that tried it died)"
    except TimeoutError as error:
        return f"the model's batched form cannot be tried ({error})"


def _reason(model: nn.Module, outputs: Outputs, samples: Tensor) -> str | None:
    """As ``trial_reason``, in this process."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            module = copy.deepcopy(model).to("cpu", torch.float64).train()
            layout = Layout.of(module)
            net = CohortNet(module, layout, len(ROWS), outputs)
            difference = _difference(
                net, ChosenOutputs(keyed(module), outputs), LiveModule(module, layout), _inputs(samples)
            )
    except Unsupported as error:
        return str(error)
    except Exception as error:
        return f"the model's batched form cannot be tried ({first_line(error, 150)})"
    return None if difference is None else f"the model's batched form has other {difference}"


def _inputs(samples: Tensor) -> Tensor:
    """Inputs of every client, [C, B, ...]."""
    shape, count = (len(ROWS), max(ROWS)), len(ROWS) * max(ROWS)
    if samples.is_floating_point():
        return torch.randn(*shape, *samples.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if not len(samples):
        return samples.new_zeros(*shape, *samples.shape[1:], device="cpu")
    return samples[torch.arange(count) % len(samples)].to("cpu").unflatten(0, shape)


def _difference(net: CohortNet, module: ChosenOutputs, live: LiveModule, x: Tensor) -> str | None:
    """The first difference, as a noun phrase for the reason; None if all agree."""
    size = len(live.theta)
    noise = torch.empty(PERIOD, dtype=torch.float64).uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    for row, scale in zip(net.theta, (0.03, -0.02), strict=True):
        row.copy_(live.theta).add_(noise.repeat(-(-size // PERIOD))[:size], alpha=scale)
    net.draw_from(dropout_draws([torch.Generator().manual_seed(client) for client in range(len(ROWS))], ROWS, "cpu"))
    with torch.no_grad():
        outputs = net.forward(x.clone())
        tests = [
            torch.sin(torch.arange(1.0, 1 + output.numel(), dtype=output.dtype)).view(output.shape)
            for output in outputs
        ]
        for client, rows in enumerate(ROWS):
            for test in tests:
                test[client, rows:] = 0
        net.grad.fill_(1)  # stale values
        net.backward(*tests)
    for client, rows in enumerate(ROWS):
        live.theta.copy_(net.theta[client])
        live.grad.zero_()
        torch.default_generator.manual_seed(client)
        expected = module(x[client, :rows].clone())
        pairs = list(zip(expected, (output[client, :rows] for output in outputs), strict=True))
        if not all(a.shape == b.shape and _close(a.detach().clone(), b, LEAST) for a, b in pairs):
            return "outputs than the module"
        torch.stack([(a * test[client, :rows]).sum() for a, test in zip(expected, tests, strict=True)]).sum().backward()
        sizes, least = [leaf.size for leaf in net.layout.parameters], max(1e-4 * _largest(live.grad), LEAST)
        for leaf, a, b in zip(
            net.layout.parameters, live.grad.split(sizes), net.grad[client].split(sizes), strict=True
        ):
            if not _close(a, b, least):
                return f"gradients than the module, of {leaf.name!r}"
    return None


def _close(expected: Tensor, value: Tensor, least: float) -> bool:
    """Whether values agree, which overwrites the expected ones; ``least`` is the smallest scale of errors."""
    scale = max(_largest(expected), least)
    return _largest(expected.sub_(value)) <= TOLERANCE * scale


def _largest(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, torch.inf)) if values.numel() else 0.0
