"""Narrow strided convolutions, whose gradients some processors cannot compute for images stored channels-last."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fedloom.models.layers import NarrowConv2d, with_safe_convolutions

TRAIN = """
import torch
import fedloom as fl
from fedloom.models.deep import residual
x, y = torch.rand(200, 3, 8, 8), torch.randint(0, 3, (200,))
net = lambda: residual("narrow", 3, (6, 10), (1, 1), classes=3, inputs=(3, 8, 8), norm="batch")
local = fl.Local(epochs=4, batch_size=16, lr=0.05)
for compute, clients in (("live", 2), ("batched", 1), ("batched", 3)):
    federation = fl.data.federate(x, "iid", clients=clients, seed=0, y=y)
    fl.run(fl.methods.fedavg(), federation, net, rounds=8, compute=compute, local=local)
print("trained")
"""


@pytest.mark.exhaustive
def test_memory_survives_narrow_strided_convolutions() -> None:
    """In a separate process, since the fault that is avoided writes beyond its memory and aborts the process."""
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "trained\n"), process.stderr[-1000:]


def test_only_the_convolutions_concerned_change_and_their_values_do_not() -> None:
    torch.manual_seed(0)
    narrow, layers = nn.Conv2d(4, 8, 1, 2), (nn.Conv2d(8, 8, 1, 2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 2))
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        before = narrow(x)
        model = with_safe_convolutions(nn.Sequential(narrow, *layers))
        assert [type(layer) for layer in model] == [NarrowConv2d, nn.Conv2d, nn.Conv2d, nn.Conv2d]
        torch.testing.assert_close(model[0](x), before)
    assert list(model.state_dict()) == [f"{n}.{name}" for n in range(4) for name in ("weight", "bias")]


def test_the_library_sees_images_and_kernels_in_the_default_order(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[tuple[bool, tuple[int, ...]]] = []
    original = nn.Conv2d._conv_forward

    def spy(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layouts.append((x.is_contiguous(), weight.stride()))
        return original(layer, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", spy)
    model = with_safe_convolutions(nn.Sequential(nn.Conv2d(4, 6, 1, 2))).to(memory_format=torch.channels_last)
    model(torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last))
    assert layouts == [(True, (4, 1, 1, 1))]
