"""FedAvg as one would write it in plain PyTorch on ``PROCESSES`` processes: the floor of the comparison."""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from turns import Turns
from workload import read

PROCESSES, DEVICE = int(os.environ["PROCESSES"]), os.environ["DEVICE"]


def main() -> None:
    """Do rounds until there are no more turns; the second process sums half of the cohort's models."""
    torch.set_num_threads(1)
    turns, work = Turns(), read(sys.argv[1])
    x, y = torch.from_numpy(work.x).to(DEVICE), torch.from_numpy(work.y).to(DEVICE)
    model = work.module().to(DEVICE)
    parameters = list(model.parameters())
    theta = torch.nn.utils.parameters_to_vector(parameters).detach().share_memory_()
    totals = torch.zeros(PROCESSES, len(theta), device=DEVICE).share_memory_()
    pipes = [torch.multiprocessing.get_context("fork").Pipe() for _ in range(PROCESSES - 1)]

    def share(number: int, round: int) -> None:
        """The sum of the models of every second client."""
        totals[number] = 0
        cohort = len(work.cohorts[round])
        for client in range(number, cohort, PROCESSES):
            with torch.no_grad():
                start = 0
                for parameter in parameters:
                    parameter.copy_(theta[start : start + parameter.numel()].view_as(parameter))
                    start += parameter.numel()
            optimizer = torch.optim.SGD(parameters, lr=work.lr)
            for at in torch.from_numpy(work.order[round, client]).split(work.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[at]), y[at]).backward()
                optimizer.step()
            with torch.no_grad():
                totals[number] += torch.cat([p.flatten() for p in parameters]) / cohort

    for number, (parent_end, child_end) in enumerate(pipes, 1):
        if os.fork() == 0:
            parent_end.close()
            try:
                while True:
                    share(number, child_end.recv())
                    child_end.send(None)
            except EOFError:
                os._exit(0)
        child_end.close()
    round = 0
    while turns.wait():
        for parent_end, _ in pipes:
            parent_end.send(round)
        share(0, round)
        for parent_end, _ in pipes:
            parent_end.recv()
        theta.copy_(totals.sum(0))
        turns.stop()
        round += 1
    turns.finish([piece.cpu().numpy() for piece in _pieces(theta, parameters)])


def _pieces(theta: torch.Tensor, like: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The vector in the shapes of the parameters."""
    return [v.view_as(p) for v, p in zip(theta.split([p.numel() for p in like]), like, strict=True)]


if __name__ == "__main__":
    main()
