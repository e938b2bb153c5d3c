"""A round of FedAvg, of SCAFFOLD and of FedDyn in plain PyTorch; the library computes the same numbers (see the tests).

Notation: θ [P] the server's model, θ_i the model that client i returns, n_i its samples, S the cohort, K all clients.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

LR, ALPHA = 0.1, 0.1
MODEL = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def train(theta, data, correction=lambda w: 0.0):
    """θ_i: SGD from θ along ∇F_i(w) + correction(w), with a step for each mini-batch of the client."""
    w, (x, y, batches, _) = theta.clone(), data
    for rows in batches:
        vector_to_parameters(w, MODEL.parameters())
        gradient = torch.autograd.grad(cross_entropy(MODEL(x[rows]), y[rows]), list(MODEL.parameters()))
        w = w - LR * (parameters_to_vector(gradient) + correction(w))
    return w


def fedavg(theta, cohort):
    """θ ← Σ_{i∈S} (n_i/n) θ_i; `cohort` maps each client of S to inputs, classes, batches of rows, and n_i."""
    n = sum(n_i for *_, n_i in cohort.values())
    return sum(data[3] / n * train(theta, data) for data in cohort.values())


def scaffold(theta, c, controls, cohort):
    """Steps along g - c_i + c; then c_i ← c_i - c + (θ - θ_i)/(k η), c ← c + (1/K) Σ (c_i⁺ - c_i), θ ← mean θ_i."""
    change, models = torch.zeros_like(c), []
    for i, data in cohort.items():
        models.append(train(theta, data, lambda w, shift=c - controls[i]: shift))
        new = controls[i] - c + (theta - models[-1]) / (len(data[2]) * LR)
        change += (new - controls[i]) / len(controls)
        controls[i] = new
    return torch.stack(models).mean(0), c + change


def feddyn(theta, h, gradients, cohort):
    """Client i minimises F_i - ⟨h_i, w⟩ + (α/2)‖w - θ‖²; h_i ← h_i - α(θ_i - θ), h ← mean h_i, θ ← mean θ_i - h/α."""
    models = []
    for i, data in cohort.items():
        models.append(train(theta, data, lambda w, h_i=gradients[i]: ALPHA * (w - theta) - h_i))
        gradients[i] = gradients[i] - ALPHA * (models[-1] - theta)
    h = h - ALPHA * sum(model - theta for model in models) / len(gradients)
    return torch.stack(models).mean(0) - h / ALPHA, h


if __name__ == "__main__":
    torch.manual_seed(0)
    clients = {}
    for i in range(10):  # clients of unequal size, each with two of three classes
        y = torch.randint(0, 2, (20 + 10 * i,)) + i % 2
        x = torch.randn(len(y), 5, dtype=torch.float64) + 1.5 * torch.nn.functional.one_hot(y, 5)
        clients[i] = (x, y, torch.arange(len(y)).split(10), len(y))
    start = parameters_to_vector(MODEL.parameters()).detach()
    plain, drift, dynamic = start, (start, 0 * start), (start, 0 * start)
    controls, gradients = dict.fromkeys(clients, 0 * start), dict.fromkeys(clients, 0 * start)
    for _ in range(20):
        cohort = {i: clients[i] for i in torch.randperm(10)[:5].tolist()}
        plain = fedavg(plain, cohort)
        drift, dynamic = scaffold(*drift, controls, cohort), feddyn(*dynamic, gradients, cohort)
    for name, theta in {"FedAvg": plain, "SCAFFOLD": drift[0], "FedDyn": dynamic[0]}.items():
        vector_to_parameters(theta, MODEL.parameters())
        right = [(MODEL(x).argmax(1) == y).double().mean().item() for x, y, *_ in clients.values()]
        print(f"{name}: accuracy {sum(right) / len(right):.3f} after 20 rounds")
