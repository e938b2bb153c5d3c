"""The exponential average of the server model over the rounds: evaluated and saved, never fed back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.core.server import Server


@dataclass
class ServerAverage:
    """θ̄_t = Σ_s ρ^(t-s) θ_s / Σ_s ρ^(t-s) over the rounds s = 1 ... t, parameters and buffers alike.

    Kept as θ̄ ← θ̄ + (1 - ρ)/(1 - ρ^t) (θ_t - θ̄) in float64: the initial model has no weight, and after one round θ̄ is
    the server's model. If few clients participate, θ fluctuates with every cohort, and θ̄ does not.

    Args:
        rho: ρ in (0, 1).
        model: θ̄ and its buffers, float64 [P + B].
        rounds: t.
    """

    rho: float
    model: Tensor
    rounds: int = 0

    @classmethod
    def of(cls, rho: float, server: Server) -> ServerAverage:
        """The state before the first round."""
        return cls(rho, torch.cat([server.theta, server.buffers]).double())

    def add(self, server: Server) -> None:
        """Add the server model of one more round."""
        self.rounds += 1
        now = torch.cat([server.theta, server.buffers]).double()
        self.model = torch.lerp(self.model, now, (1 - self.rho) / (1 - self.rho**self.rounds))

    def server(self, server: Server) -> Server:
        """The server with θ̄ in place of θ."""
        theta, buffers = self.model.split([len(server.theta), len(server.buffers)])
        return replace(server, theta=theta.to(server.theta), buffers=buffers.to(server.buffers))
