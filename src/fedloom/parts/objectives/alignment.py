"""Class means that clients exchange instead of models: of features (FedProto, FedTGP, FedGH), or of outputs.

The server of FedProto and of federated distillation takes means of what it receives; the server of FedTGP and of FedGH
trains on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.targets import ONE_CLASS


@dataclass(frozen=True)
class PrototypeAlignment(Term):
    """(λ/d) ‖r(x) - C_y‖²: pulls features r(x) [B, d] towards the global prototype C_y of their class.

    ::

        C_j ← Σ_{i∈S} Σ_{x: y=j} r_i(x) / Σ_{i∈S} n_ij

    After local training a client uploads the sum of its features [C, d] and its label counts n_i [C], computed in
    evaluation mode over all its training samples. The server keeps the previous prototype of a class that does not
    occur in the cohort; classes without a prototype contribute nothing. The term is used beside cross entropy with
    ``personal=local_only``: no parameters are communicated.

    Tan, Long, Liu, Zhou, Lu, Jiang & Zhang, AAAI 2022, algorithm 1. Deviations: the squared distance is averaged over
    the d features, the prototypes over samples, and a client deploys its own model with its head; for the nearest class
    mean choose ``adaptation=proto`` with ``adaptation.training=false``.

    Args:
        lam: λ ≥ 0, weight of the term; with 0 clients train alone.
    """

    lam: NonNegative = 1.0

    needs = Needs(features=True, model="evaluated", common_classes=True)
    targets = ONE_CLASS
    uploads = {"sums": Reduce.MEAN, "counts": Reduce.MEAN}  # noqa: RUF012
    downloads = ("prototypes", "known")
    fits_all = True
    common = True
    citation = "tan2022fedproto"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {}  # the number of features is known when the first prototypes arrive

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        distance = _distance(out, batch, ctx)
        return self.lam * ctx.down["known"][batch.y] * distance if "known" in ctx.down else distance

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        sums, counts = _features(ctx, model)
        return ClientEnd(ctx.state, {"sums": sums, "counts": counts}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        sums, counts = uploads["sums"], uploads["counts"]
        old = state or {"prototypes": torch.zeros_like(sums), "known": torch.zeros_like(counts)}
        present = (counts > 0)[:, None]
        new = torch.where(present, sums / counts.clamp(min=1e-12)[:, None], old["prototypes"])
        return {"prototypes": new, "known": torch.maximum(old["known"], present[:, 0].to(new.dtype))}, update


@dataclass(frozen=True)
class TrainablePrototypes(Term):
    """(λ/d) ‖r(x) - P_y‖²: pulls features r(x) [B, d] towards a prototype that the server has trained to lie apart.

    ::

        P_c = W₂ max(0, W₁ e_c + b₁) + b₂         e_c [d] for each class; W₁, W₂ [d, d]: all trained at the server
        min over e, W, b of the mean over clients i and their classes c of -log softmax(z_ic)_c
        z_icj = -‖P_ic - P_j‖ - δ·[j = c]         δ = min(τ, max_{c,c'} ‖Q_c - Q_c'‖),   Q_c = mean over clients of P_ic

    After local training a client uploads the means P_ic [C, d] of its features, computed in evaluation mode over all
    its training samples, and which classes it has [C]. The server continues with its e, W and b of the round before,
    by SGD on mini-batches of these means. In the first round clients have no prototypes and train alone. The term is
    used beside cross entropy with ``personal=local_only`` or ``own_architectures``: no parameters are communicated.

    Zhang, Liu, Hua & Cao, AAAI 2024 (FedTGP), algorithm 1. Deviations: the client's pull is FedProto's, the squared
    distance averaged over the d features; the authors' code takes, as the margin before its bound, the largest distance
    of a class to the class nearest to it.

    Args:
        lam: λ ≥ 0, weight of the term; with 0 clients train alone.
        margin: τ ≥ 0, largest margin.
        epochs: passes of the server over the means in each round.
        lr: the server's learning rate.
        batch_size: means in a step of the server.
    """

    lam: NonNegative = 1.0
    margin: NonNegative = 100.0
    epochs: NonNegativeInt = 100
    lr: Positive = 0.01
    batch_size: Count = 10

    needs = Needs(features=True, model="evaluated", common_classes=True)
    targets = ONE_CLASS
    uploads = {"means": Reduce.ALL, "has": Reduce.ALL}  # noqa: RUF012
    downloads = ("prototypes",)
    fits_all = True
    common = True
    citation = "zhang2024fedtgp"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return self.lam * _distance(out, batch, ctx)

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd(ctx.state, _means(ctx, model), update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        means, has = uploads["means"], uploads["has"] > 0
        points, y = means[has], has.nonzero()[:, 1]
        if not len(y):
            return state, update
        centres = ((means * has[..., None]).sum(0) / has.sum(0).clamp(min=1)[:, None])[has.any(0)]
        margin = min(self.margin, float((centres[:, None] - centres).norm(dim=-1).max()))

        def loss(tree: Tree, rows: Tensor) -> Tensor:
            distances = (points[rows, None] - _prototypes(tree)).norm(dim=-1)
            one_hot = functional.one_hot(y[rows], means.shape[1]).to(means)
            return functional.cross_entropy(-distances - margin * one_hot, y[rows])

        network = {name: value for name, value in state.items() if name != "prototypes"}
        network = _descend(network or _network(means, info.facts), loss, len(y), self, info)
        return {**network, "prototypes": _prototypes(network)}, update


@dataclass(frozen=True)
class HeadOnMeans(Term):
    """The server trains the shared head on the clients' class means of features, instead of averaging their heads.

    ::

        h ← h - η ∇ mean of ℓ(h(P_ic), c) over mini-batches of the clients' class means P_ic         at the server

    A client receives the head h, a linear layer, trains it with its own body by cross entropy, and uploads the means
    P_ic [C, d] of its features, computed in evaluation mode over all its training samples, and which classes it has
    [C]; its own head is discarded. The term adds nothing to the clients' loss. It is used with
    ``personal=private_body``, or ``own_bodies`` for networks of different architecture.

    Yi, Wang, Liu, Shi & Yu, ACM MM 2023 (FedGH), algorithm 1, where the server takes a step for every mean. Deviation:
    the clients' changes of the head are sent and counted, as in ``lg_fedavg``, though the server does not use them.

    Args:
        epochs: passes of the server over the means in each round; with 0 the head stays as it is.
        lr: η > 0.
        batch_size: means in a step of the server.
    """

    epochs: NonNegativeInt = 1
    lr: Positive = 0.01
    batch_size: Count = 1

    needs = Needs(features=True, model="evaluated", common_classes=True)
    targets = ONE_CLASS
    uploads = {"means": Reduce.ALL, "has": Reduce.ALL}  # noqa: RUF012
    fits_all = True
    citation = "yi2023fedgh"

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd(ctx.state, _means(ctx, model), update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        means, has = uploads["means"], uploads["has"] > 0
        points, y = means[has], has.nonzero()[:, 1]
        (classes, width), size = means.shape[1:], len(info.received)
        if size not in (classes * width, classes * (width + 1)):
            raise ConfigError(
                f"objective 'head_on_means' trains {classes} x {width} weights of a linear head, with or without a "
                f"bias, but clients share {size} parameters; set personal=private_body, and give the model such a head."
            )

        def loss(tree: Tree, rows: Tensor) -> Tensor:
            weight, bias = tree["head"][: classes * width].view(classes, width), tree["head"][classes * width :]
            logits = functional.linear(points[rows], weight, bias if len(bias) else None)
            return functional.cross_entropy(logits, y[rows])

        head = _descend({"head": info.received}, loss, len(y), self, info)["head"]
        return state, info.received - head


@dataclass(frozen=True)
class ClassOutputs(Term):
    """γ·H(F̂_iy, p(x)), p = softmax(logits) [B, C]: distils the other clients' mean output for samples of the class y.

    ::

        F̄_jc = mean of p_j(x) over the samples of class c at client j                 uploaded after local training
        F̂_ic = mean of F̄_jc over the other clients j ≠ i of the last cohort in which any had the class

    H is the cross entropy; F̂ and F̄ have the shape [C, C] whatever the network, so that clients of different
    architecture exchange them. The term is used beside cross entropy with ``personal=local_only`` or
    ``own_architectures``. A class of which no other client has samples contributes nothing.

    Jeong, Oh, Kim, Park, Bennis & Kim 2018 (federated distillation, FD), algorithm 1. Deviations: F̄ is that of the
    trained model in evaluation mode, not the mean over the samples as they are trained on; a client that lacks a class
    is not counted for it. With ``schedule=buffered`` a client's own outputs may be among the others'.

    Args:
        gamma: γ ≥ 0, weight of the term; with 0 clients train alone.
    """

    gamma: NonNegative = 1.0

    needs = Needs(model="evaluated", common_classes=True)
    targets = ONE_CLASS
    uploads = {"outputs": Reduce.SUM, "holders": Reduce.SUM}  # noqa: RUF012
    downloads = ("outputs", "holders", "rounds")
    fits_all = True
    common = True
    citation = "jeong2018distillation"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        zeros = theta.new_zeros(facts.classes)
        return {"outputs": zeros.repeat(facts.classes, 1), "holders": zeros, "rounds": zeros - 1}

    def begin(self, ctx: Context) -> Tree:
        """F̂_i [C, C], and the classes that it is defined for, [C] zeros and ones."""
        outputs, holders = ctx.down["outputs"], ctx.down["holders"]
        if ctx.state:  # without the client's own outputs, for the classes whose sums hold them
            contributes = (ctx.down["rounds"] == ctx.state["round"]) * ctx.state["has"]
            outputs, holders = outputs - contributes[:, None] * ctx.state["own"], holders - contributes
        return {"others": outputs / holders.clamp(min=1)[:, None], "known": (holders > 0.5).to(outputs.dtype)}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        entropy = -(ctx.local["others"][batch.y] * out.logits.log_softmax(-1)).sum(-1)
        return self.gamma * ctx.local["known"][batch.y] * entropy

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        sums, counts = ctx.by_class(model, lambda x: model(x).softmax(-1))
        means, has = sums / counts.clamp(min=1)[:, None], (counts > 0).to(sums.dtype)
        state = {"own": means, "has": has, "round": has.new_tensor(ctx.round)}
        return ClientEnd(state, {"outputs": means, "holders": has}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        present = uploads["holders"] > 0
        new = {
            name: torch.where(present if value.ndim == 1 else present[:, None], value, state[name])
            for name, value in (*uploads.items(), ("rounds", torch.full_like(state["rounds"], info.t)))
        }
        return new, update


def _distance(out: Output, batch: Batch, ctx: Context) -> Tensor:
    """(1/d) ‖r(x) - C_y‖² [B] with the received prototypes; 0 without any."""
    r = out.vectors
    return (r - ctx.down["prototypes"][batch.y]).square().mean(1) if "prototypes" in ctx.down else 0 * r.sum(1)


def _features(ctx: Context, model: Model) -> tuple[Tensor, Tensor]:
    """Sums of a client's features by class [C, d], and numbers of samples [C]."""
    return ctx.by_class(model, lambda x: model.features(x).flatten(1))  # pyright: ignore


def _means(ctx: Context, model: Model) -> Tree:
    """Means of a client's features by class, [C, d], and which classes it has, [C] zeros and ones."""
    sums, counts = _features(ctx, model)
    return {"means": sums / counts.clamp(min=1)[:, None], "has": (counts > 0).to(sums.dtype)}


def _network(means: Tensor, facts: Facts) -> Tree:
    """Initial vectors e [C, d], and W [2, d, d] and b [2, d] of a network that maps them to prototypes.

    They are those of PyTorch's layers: e is standard normal, W and b uniform in ±1/√d.
    """
    draws, (classes, width) = rng.stream(facts.seed, "prototypes"), means.shape[1:]
    bound = width**-0.5
    shapes = {"weights": (2, width, width), "biases": (2, width)}
    uniform = {name: means.new_tensor(draws.uniform(-bound, bound, shape)) for name, shape in shapes.items()}
    return {"vectors": means.new_tensor(draws.normal(size=(classes, width))), **uniform}


def _prototypes(network: Tree) -> Tensor:
    """P [C, d]."""
    (w1, w2), (b1, b2) = network["weights"], network["biases"]
    return functional.linear(functional.linear(network["vectors"], w1, b1).relu(), w2, b2)


def _descend(
    start: Tree, loss: Callable[[Tree, Tensor], Tensor], count: int, settings: TrainablePrototypes | HeadOnMeans,
    info: RoundInfo,
) -> Tree:  # fmt: skip
    """Return the tree after SGD on a loss of mini-batches of ``count`` rows, in a new random order in each epoch."""
    tree = start
    for epoch in range(settings.epochs):
        order = torch.from_numpy(rng.stream(info.facts.seed, "class means", info.t, epoch).permutation(count))
        for rows in order.to(info.received.device).split(settings.batch_size):
            leaves = {name: value.detach().requires_grad_() for name, value in tree.items()}
            with torch.enable_grad():
                slopes = torch.autograd.grad(loss(leaves, rows), [*leaves.values()])
            pairs = zip(tree.items(), slopes, strict=True)
            tree = {name: value - settings.lr * slope for (name, value), slope in pairs}
    return tree
