"""The models of C clients as one network with its own backward pass; parameters are rows of one tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.base.tree import Float, Shaped
from fedloom.compute.cohort.factored import Clipped
from fedloom.compute.cohort.layers import Draws, Unsupported
from fedloom.compute.cohort.parameters import Parameter, StepRule, new_rows, parameters
from fedloom.compute.cohort.pointwise import Dropout
from fedloom.compute.cohort.replay import Replays
from fedloom.compute.cohort.trace import Outputs, Program, trace
from fedloom.core.layout import Layout
from fedloom.core.local import clip_factor
from fedloom.rounds.step import adam


def has_fused_steps(theta: Tensor) -> bool:
    """Whether a client's step is one pass over memory; steps that are recorded need their numbers in memory."""
    return theta.is_cpu


class RowSteps:
    """Takes the steps of a rule on a cohort's rows, and of a ``first`` layer that is clipped with them.

    Example:
        >>> theta, grad = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> steps = RowSteps(theta, grad)
        >>> steps.begin(StepRule(lr=1.0, clip=1.0))
        >>> steps(2)
        >>> theta
        tensor([[-0.6000, -0.8000],
                [-0.3000, -0.4000]])
    """

    def __init__(self, theta: Float[Tensor, "C P"], grad: Float[Tensor, "C P"], first: Clipped | None = None) -> None:
        self.theta, self.grad, self.first = theta, grad, first
        self.rule, self.number = StepRule(0.0), 0
        self.back, self.decay = theta.new_zeros(2).unbind()  # -η and 1 - ηd
        self.velocity: Tensor | None = None
        self.second: Tensor | None = None  # Adam's second moments; ``velocity`` are the first ones

    def begin(self, rule: StepRule) -> None:
        """Begin a round with a rule, and with zero momentum."""
        self.rule, self.number = rule, 0
        self.back.fill_(-rule.lr)
        self.decay.fill_(rule.decay_factor)
        if rule.momentum or rule.betas:
            self.velocity = self._zeros(self.velocity)
        if rule.betas:
            self.second = self._zeros(self.second)

    def _zeros(self, memory: Tensor | None) -> Tensor:
        return new_rows(len(self.theta), self.theta.shape[1], self.theta) if memory is None else memory.zero_()

    def __call__(self, count: int, numbers: Float[Tensor, "c 3"] | None = None) -> None:
        """Take the step of the first c clients; their gradients are overwritten by h, see ``StepRule``.

        ``numbers`` are those of the step, if any change.
        """
        rule, theta, grad = self.rule, self.theta[:count], self.grad[:count]
        back, decay = self.back, self.decay
        if numbers is not None:
            back = self.back * numbers[:, :1]
            decay = (rule.weight_decay * back).add_(1)
        if rule.slope != 1:
            grad.mul_(rule.slope)
        if rule.pull:
            grad.add_(theta, alpha=rule.pull)
        if rule.constant is not None:
            grad.add_(rule.constant[:count])
        scale = None
        if rule.clip is not None:
            norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
            if self.first is not None:
                norm = (norm.square() + self.first.squared_norm()[:, None]).sqrt().to(norm)
            scale = clip_factor(norm, rule.clip)
            if self.first is not None:
                self.first.step(scale[:, 0])
        if rule.betas or rule.nesterov:
            if scale is not None:
                grad.mul_(scale)
            if rule.betas and has_fused_steps(theta):
                self._adam(back.expand(count, 1))
                return
            if rule.decoupled and rule.weight_decay:
                theta.mul_(decay)
            elif rule.weight_decay:
                grad.add_(theta, alpha=rule.weight_decay)
            self._direct(grad, numbers)
            theta.addcmul_(grad, back)
            return
        if not rule.momentum:
            if rule.weight_decay:
                theta.mul_(decay)
            theta.addcmul_(grad, back if scale is None else back * scale)
            return
        assert self.velocity is not None
        velocity = self.velocity[:count].mul_(rule.momentum)
        if scale is None:
            velocity.add_(grad)
        else:
            velocity.addcmul_(grad, scale)
        if rule.weight_decay:
            velocity.add_(theta, alpha=rule.weight_decay)
        theta.addcmul_(velocity, back)

    def _adam(self, back: Float[Tensor, "c 1"]) -> None:
        """A step of Adam for one client after the other."""
        rule = self.rule
        assert rule.betas is not None
        assert self.velocity is not None
        assert self.second is not None
        self.number += 1
        for row, rate in enumerate((-back[:, 0]).tolist()):
            moments = self.velocity[row], self.second[row]
            settings = rule.betas, rule.weight_decay, rule.decoupled
            adam(self.theta[row], self.grad[row], moments, self.number, rate, *settings)

    def _direct(self, grad: Float[Tensor, "c P"], numbers: Float[Tensor, "c 3"] | None) -> None:
        """Turn gradients into the direction of Nesterov momentum, g + m·v, or of Adam, m̂ / (√ŝ + 10⁻⁸)."""
        rule, count = self.rule, len(grad)
        assert self.velocity is not None
        if rule.betas is None:
            grad.add_(self.velocity[:count].mul_(rule.momentum).add_(grad), alpha=rule.momentum)
            return
        assert self.second is not None
        assert numbers is not None
        (beta1, beta2), first, second = rule.betas, self.velocity[:count], self.second[:count]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.sqrt(second, out=grad)
        grad.mul_(numbers[:, 2:]).add_(1e-8)
        torch.div(first, grad, out=grad)
        grad.mul_(numbers[:, 1:2])


class CohortNet:
    """The layers of a model for C clients at once, each client with its own weights.

    All methods accept batches of only the first c ≤ C clients. Padding rows of a batch have zero gradients, so that
    each client's arithmetic equals that of its module alone, up to rounding.

    Args:
        model: the module of one client; its parameters are not modified.
        layout: the order of the parameters in a row.
        clients: C, the largest number of clients.
        outputs: what forward returns: ``logits``, ``features`` (logits and features) or ``ends`` (logits at all exits).
        device: the device of the rows.
        operand_dtype: the dtype to which convolutions and linear layers round the factors of their products; None for
            the dtype of the parameters.
        rows: memory for ``theta`` and ``grad``; None allocates it.

    Attributes:
        theta: the clients' parameters [C, P]; the layers' weights are views of it.
        grad: their gradients [C, P], written by ``backward``.
        replays: recorded local steps, on a GPU.
        row_steps: steps that wait for the gradients of all parameters, once there were any.

    Raises:
        Unsupported: if the model has no cohort form; see ``reason``.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> net = CohortNet(model, Layout.of(model), clients=5)
        >>> net.theta.normal_().shape
        torch.Size([5, 26])
        >>> (logits,) = net.forward(torch.ones(5, 7, 3))  # 7 rows per client
        >>> net.backward(torch.ones_like(logits))
        >>> logits.shape, net.grad.shape
        (torch.Size([5, 7, 2]), torch.Size([5, 26]))
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        clients: int,
        outputs: Outputs = "logits",
        device: torch.device | str = "cpu",
        operand_dtype: torch.dtype | None = None,
        rows: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        like = torch.empty(0, dtype=layout.dtype, device=device)
        self.layout, self.clients = layout, clients
        self.theta, self.grad = rows or (new_rows(clients, layout.size, like), new_rows(clients, layout.size, like))
        self.parameters = parameters(model, layout, self.theta, self.grad, operand_dtype)
        self.program = trace(model, self.parameters, outputs)
        attributes = (value for step in self.program.steps for value in vars(step.layer).values())
        used = {value for value in attributes if isinstance(value, Parameter)}
        self.idle = [p for p in self.parameters.values() if p not in used and p.grad is not None]
        self.replays: Replays | None = None
        self.row_steps: RowSteps | None = None
        self._velocity: Tensor | None = None
        self._moves_idle = False

    @staticmethod
    def reason(model: nn.Module, outputs: Outputs = "logits") -> str | None:
        """The reason why a model has no cohort form; None if it has one.

        >>> CohortNet.reason(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        "the model keeps a buffer, '1.running_mean'"
        """
        for name, _ in model.named_buffers():
            return f"the model keeps a buffer, {name!r}"
        try:
            CohortNet(model, Layout.of(model), 1, outputs)
        except Unsupported as error:
            return str(error)
        return None

    @property
    def random_layers(self) -> int:
        """Number of keys that a forward pass takes."""
        return sum(isinstance(step.layer, Dropout) and step.layer.is_random for step in self.program.steps)

    def draw_from(self, draws: Draws | None) -> None:
        """Set the keys of the next forward pass; None disables randomness."""
        for step in self.program.steps:
            step.layer.draws = draws

    def place(self, name: str) -> slice:
        """The slice of a row that holds a trained parameter."""
        start = 0
        for leaf in self.layout.parameters:
            if leaf.name == name:
                return slice(start, start + leaf.size)
            start += leaf.size
        raise KeyError(name)

    def forward(
        self, x: Shaped[Tensor, "c B ..."], program: Program | None = None
    ) -> tuple[Float[Tensor, "c B ..."], ...]:
        """The outputs for inputs of the first c clients.

        ``program`` may replace the network's own; it must use the same parameters.
        """
        program = program or self.program
        values = _values(program, x)
        return tuple(values[number] for number in program.outputs)

    def activations(self, x: Tensor) -> int:
        """Number of values that the layers compute for one sample [1, 1, ...] of one client."""
        return sum(value.numel() for value in _values(self.program, x))

    def backward(self, *grads: Float[Tensor, "c B ..."] | None, program: Program | None = None) -> None:
        """Compute the gradients of all parameters from those of the outputs.

        They are written to ``grad``, or applied immediately after ``descend``. None stands for an output without a
        loss: parameters that only this output depends on are left unchanged. Gradients of parameters that no layer uses
        are written as zeros, since the receiver of the last ones may have overwritten them.
        """
        program = program or self.program
        for parameter in self.idle:
            if parameter.rule is None and parameter.grad is not None:
                parameter.grad.zero_()
        values: list[Tensor | None] = [None] * program.values
        for number, grad in zip(program.outputs, grads, strict=True):
            _collect(values, number, grad)
        for step in reversed(program.steps):
            grad, values[step.output] = values[step.output], None
            if grad is None:
                continue
            for number, input_grad in zip(step.inputs, step.layer.backward(grad), strict=True):
                _collect(values, number, input_grad)
        if self._moves_idle:
            count = next(len(grad) for grad in grads if grad is not None)
            for parameter in self.idle:
                parameter.take(parameter.value.new_zeros(()).expand_as(parameter.value[:count]))

    def descend(self, rule: StepRule | None, frozen: Collection[str] = ()) -> None:
        """Make ``backward`` take a step of this rule, starting with zero momentum; None: write to ``grad`` again.

        Parameters with ``frozen`` names stay as they are.
        """
        velocity = constant = None
        if rule is not None and rule.momentum:
            if self._velocity is None:
                self._velocity = new_rows(self.clients, self.layout.size, self.theta)
            velocity = self._velocity.zero_()
        if rule is not None:
            constant = rule.constant
        for leaf, leaf_velocity, leaf_constant in zip(
            self.layout.parameters, self._cut(velocity), self._cut(constant), strict=True
        ):
            self.parameters[leaf.name].descend(rule, leaf_velocity, leaf_constant)
            self.parameters[leaf.name].frozen = leaf.name in frozen
        self._moves_idle = rule is not None and rule.moves_all

    def at_step(self, rule: StepRule, number: int) -> StepRule:
        """Take one step of ``descend``'s rule at its own rate; returns the rule of that step."""
        step_rule = rule.at(number)
        if step_rule is not rule:
            for parameter in self.parameters.values():
                parameter.rule = step_rule
        return step_rule

    def step_by_rows(self, rule: StepRule) -> RowSteps:
        """The steps of this rule, starting with zero momentum; ``backward`` writes to ``grad``."""
        self.descend(None)
        if self.row_steps is None:
            self.row_steps = RowSteps(self.theta, self.grad)
        self.row_steps.begin(rule)
        return self.row_steps

    def step_after(self, place: slice, first: Clipped, rule: StepRule) -> RowSteps:
        """As ``step_by_rows``, for the parameters after those at ``place``, which ``first`` steps by itself."""
        self.descend(None)
        rest = slice(place.stop, None)
        steps = RowSteps(self.theta[:, rest], self.grad[:, rest], first)
        steps.begin(rule if rule.constant is None else replace(rule, constant=rule.constant[:, rest]))
        return steps

    def _cut(self, rows: Float[Tensor, "C P"] | None) -> Sequence[Tensor | None]:
        """Split rows into the parameters' segments [C, size]."""
        sizes = [leaf.size for leaf in self.layout.parameters]
        return [None] * len(sizes) if rows is None else rows.split(sizes, 1)


def _values(program: Program, x: Tensor) -> list[Tensor]:
    """All intermediate values of a network at the inputs."""
    values = [x] * program.values
    for step in program.steps:
        values[step.output] = step.layer.forward(*(values[number] for number in step.inputs))
    return values


def _collect(values: list[Tensor | None], number: int, grad: Tensor | None) -> None:
    """Add a gradient to the one a value already has."""
    if grad is not None:
        before = values[number]
        values[number] = grad if before is None else before + grad
