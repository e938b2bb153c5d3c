"""Local work of a block of clients in lockstep: all open requests are answered in one batched pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.compute.cohort import CohortNet, StepRule, cross_entropy, dropout_draws
from fedloom.core.context import Output
from fedloom.rounds.client import Answer, ClientWork, LocalWork, Request, Vectors
from fedloom.rounds.exchange import Broadcast, Result
from fedloom.rounds.objective import Net, companions, loss
from fedloom.rounds.plan import ClientPlan


@dataclass
class _Client:
    """One row of the network: its local work, its open request, and finally its result."""

    job: ClientWork
    work: LocalWork
    request: Request | None = None
    result: Result | None = None


class Lockstep:
    """Drives the local work of a block of clients."""

    def __init__(
        self, plan: ClientPlan, net: CohortNet, live: Net, down: Broadcast, draws: list[torch.Generator] | None
    ) -> None:  # fmt: skip
        self.plan, self.net, self.live, self.draws = plan, net, live, draws
        self.rule = StepRule(down.lr) if plan.uses_plain_sgd else None
        self.is_closed_form = plan.method.is_cross_entropy and not plan.exit_weights

    def run(self, work: Sequence[tuple[ClientWork, Vectors]]) -> list[Result]:
        """The clients' results; row r of the network is the model of client r."""
        clients = [_Client(job, job.run(vectors)) for job, vectors in work]
        self.net.descend(self.rule)
        self.live.train()
        for row in range(len(clients)):
            self._advance(clients, row, None)
        while open_rows := [row for row, client in enumerate(clients) if client.request is not None]:
            requests = [client.request for client in clients[: open_rows[-1] + 1]]
            for row, answer in zip(open_rows, self._answers(requests, open_rows), strict=True):
                self._advance(clients, row, answer)
        self.net.descend(None)
        return [client.result for client in clients if client.result is not None]

    def _advance(self, clients: list[_Client], row: int, answer: Answer | Exception | None) -> None:
        """Advance a client to its next request or its end; an exception, in its loss too, becomes a failure."""
        client = clients[row]
        before = self._switch_generator(row)
        try:
            if isinstance(answer, Exception):
                client.request = client.work.throw(answer)
            else:
                client.request = next(client.work) if answer is None else client.work.send(answer)
        except StopIteration as end:
            client.request, client.result = None, end.value
        except Exception as error:
            client.request, client.result = None, client.job.as_failure(error)
        finally:
            self._restore_generator(row, before)

    def _switch_generator(self, row: int) -> Tensor | None:
        """If layers are random, switch PyTorch's generator to the client's stream; return the state to restore."""
        if self.draws is None:
            return None
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self.draws[row].get_state())
        return before

    def _restore_generator(self, row: int, before: Tensor | None) -> None:
        if self.draws is not None and before is not None:
            default = torch.default_generator
            self.draws[row].set_state(default.get_state())
            default.set_state(before)

    def _answers(self, requests: list[Request | None], rows: list[int]) -> list[Answer | Exception]:
        """Gradients [P] and losses [] of the open requests, or the exceptions; other rows compute on padding."""
        sizes = [0 if request is None else len(request.batch.x) for request in requests]
        if self.draws is not None:
            self.net.draw_from(dropout_draws(self.draws, sizes, self.plan.device))
        outputs = self.net.forward(_inputs(requests, sizes))
        errors: dict[int, Exception] = {}
        if self.is_closed_form:
            losses, grads = self._cross_entropy(requests, sizes, outputs)
        else:
            losses, grads = self._objective(requests, sizes, outputs, errors)
        self.net.backward(*grads)
        plain = self.rule is not None
        return [errors.get(row) or (None if plain else self.net.grad[row], losses[row]) for row in rows]

    def _cross_entropy(
        self, requests: list[Request | None], sizes: list[int], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The losses [c] and their gradients with respect to the logits, in closed form."""
        width, logits = max(sizes), outputs[0]
        first = next(request for request in requests if request is not None).batch.y
        labels = first.new_zeros(len(requests), width, *first.shape[1:])
        weights = torch.zeros(len(requests), width, dtype=torch.float64)
        for row, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            if request is not None:
                labels[row, :size] = request.batch.y
                weights[row, :size] = 1 / size
        losses, grad = cross_entropy(logits[:, :width], labels, weights.to(logits))
        grads: list[Tensor | None] = [grad, *(None for _ in outputs[1:])]
        return losses, grads

    def _objective(
        self,
        requests: list[Request | None],
        sizes: list[int],
        outputs: tuple[Tensor, ...],
        errors: dict[int, Exception],
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The losses [] of all rows and their gradients by the outputs, by autograd; exceptions go to ``errors``."""
        plan, width = self.plan, max(sizes)
        leaves = [value.detach().requires_grad_() for value in outputs]
        losses = [torch.zeros((), dtype=plan.layout.dtype, device=outputs[0].device)] * len(requests)
        with torch.enable_grad():
            for row, (request, size) in enumerate(zip(requests, sizes, strict=True)):
                if request is None:
                    continue
                out = self._output([leaf[row] for leaf in leaves], size, width, request.batch.twin is not None)
                before = None
                try:
                    out = companions(plan, self.live, out, request.batch.x, request.at, plan.buffers0)
                    before = self._switch_generator(row)  # terms may evaluate the module at other parameters
                    losses[row] = loss(plan, out, request.batch, request.contexts)
                except Exception as error:
                    errors[row] = error
                finally:
                    self._restore_generator(row, before)
            total = torch.stack([*losses, 0 * leaves[0].sum()]).sum()  # a loss may not depend on the outputs
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
        return [value.detach() for value in losses], list(grads)

    def _output(self, values: list[Tensor], size: int, width: int, twin: bool) -> Output:
        """A client's output from its row of outputs; second views come after the first ones."""
        if self.plan.exit_weights:
            *early, last = (value[:size] for value in values)
            return Output(last, early=tuple(early))
        out = Output(values[0][:size], values[1][:size] if len(values) > 1 else None)
        return out._replace(twin=values[0][width : width + size]) if twin else out


def _inputs(requests: list[Request | None], sizes: list[int]) -> Tensor:
    """The inputs of all rows, [c, B, ...], or [c, 2B, ...] with second views; smaller batches are padded."""
    batches = [request.batch for request in requests if request is not None]
    if len(set(sizes)) == 1 and batches[0].twin is None:
        return torch.stack([batch.x for batch in batches])
    width, first = max(sizes), batches[0].x
    views = 1 if batches[0].twin is None else 2
    inputs = first[0].expand(len(requests), views * width, *first.shape[1:]).clone()
    for row, (request, size) in enumerate(zip(requests, sizes, strict=True)):
        if request is not None:
            inputs[row] = request.batch.x[0]
            inputs[row, :size] = request.batch.x
            if request.batch.twin is not None:
                inputs[row, width : width + size] = request.batch.twin
    return inputs
