"""FedProto: clients share what their models make of a class, and no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.errors import ConfigError
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.slots import objectives
from fedloom.core.tree import Tree

AT_ONCE = 1000  # samples of a forward pass


@objectives.register(name="alignment")
@dataclass(frozen=True)
class PrototypeAlignment(Term):
    """(λ/d) ‖r(x) - C_y‖²: features r(x) [B, d] are drawn to the prototype of their class over all clients.

    ::

        C_j ← Σ_{i∈S} Σ_{x: y=j} r_i(x) / Σ_{i∈S} n_ij

    A client sends the sum of its features and its number of samples for each class j, after local work. The server
    keeps the prototype of a class that nobody in the cohort has; one that nobody ever had draws nothing. A term beside
    cross entropy, for clients that keep their models (``personal=local_only``), which then need only agree in d.

    Tan, Long, Liu, Zhou, Lu, Jiang & Zhang, AAAI 2022, algorithm 1. The square over d is the mean that their code
    takes, the mean over clients is weighted by samples, and a client deploys its own model, head included; nearest
    class means are ``adaptation=proto adaptation.training=false``.

    Args:
        lam: λ ≥ 0; with 0 nothing that is shared has an effect.
    """

    lam: float = 1.0

    needs = Needs(features=True, model=True, samples=True)
    uploads = {"sums": Reduce.MEAN, "counts": Reduce.MEAN}  # noqa: RUF012
    downloads = ("prototypes", "known")
    citation = """@inproceedings{tan2022fedproto,
  title={{FedProto}: Federated Prototype Learning across Heterogeneous Clients},
  author={Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing and Zhang, Chengqi},
  booktitle={AAAI Conference on Artificial Intelligence}, year={2022}}"""

    def __post_init__(self) -> None:
        if not 0 <= self.lam < float("inf"):
            raise ConfigError(f"objective 'alignment' needs a finite lam of at least 0, not {self.lam:g}.")

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """No prototypes: how long they are shows when the first arrive."""
        return {}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B]."""
        assert out.features is not None
        r = out.features.flatten(1)
        if "known" not in ctx.down:
            return 0 * r.sum(1)
        apart = (r - ctx.down["prototypes"][batch.y]).square().mean(1)
        return self.lam * ctx.down["known"][batch.y] * apart

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """Σ r(x) [C, d] and n_i [C] over all training samples of the client, in evaluation mode."""
        assert ctx.samples is not None
        model.eval()  # pyright: ignore[reportFunctionMemberAccess]
        pieces = [model.features(x).flatten(1) for x in ctx.samples.x.split(AT_ONCE)]  # pyright: ignore
        model.train()  # pyright: ignore[reportFunctionMemberAccess]
        owner = torch.nn.functional.one_hot(ctx.samples.y, ctx.facts.classes).to(pieces[0].dtype)
        return ClientEnd(ctx.state, {"sums": owner.T @ torch.cat(pieces), "counts": owner.sum(0)}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """The prototypes of the classes that the cohort has."""
        sums, counts = uploads["sums"], uploads["counts"]
        old = state or {"prototypes": torch.zeros_like(sums), "known": torch.zeros_like(counts)}
        here = (counts > 0)[:, None]
        new = torch.where(here, sums / counts.clamp(min=1e-12)[:, None], old["prototypes"])
        return {"prototypes": new, "known": torch.maximum(old["known"], here[:, 0].to(new.dtype))}, update
