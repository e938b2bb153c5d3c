"""Inception's features need a file of weights, in either of its two known layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom_apps.synthesis.generation import inception


def test_inception_needs_a_file_of_its_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge\.inception=.* cannot be read: .*No such file"):
        inception(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("nothing")
    with pytest.raises(ConfigError, match=r"judge\.inception=.* cannot be read"):
        inception(tmp_path / "text.pth")


@pytest.mark.extra("torchvision")
@pytest.mark.parametrize(("classes", "name"), [(1000, "inception of torchvision"), (1008, "inception of FID")])
def test_inception_features(tmp_path: Path, classes: int, name: str) -> None:
    """Random weights in the two known layouts: torchvision's own pooling, and the published one, block by block."""
    try:
        from torchvision.models import inception_v3
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    torch.manual_seed(0)
    net = inception_v3(weights=None, num_classes=classes, aux_logits=classes == 1000, init_weights=False)
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    features = inception(tmp_path / "weights.pth")
    assert features.name == name
    grey = torch.rand(2, 1, 20, 20)
    vectors = features(grey)
    assert vectors.shape == (2, 2048)
    torch.testing.assert_close(vectors, features(grey.expand(-1, 3, -1, -1)))
    if classes == 1000:
        net.fc = nn.Identity()  # pyright: ignore
        large = nn.functional.interpolate(grey.expand(-1, 3, -1, -1), (299, 299), mode="bilinear")
        torch.testing.assert_close(vectors, net.eval()(2 * large - 1).detach())
    for block, channels, side in (
        ("Mixed_5b", 192, 9),
        ("Mixed_6c", 768, 7),
        ("Mixed_7b", 1280, 5),
        ("Mixed_7c", 2048, 5),
    ):
        part = features.module.get_submodule(f"net.{block}").eval()
        x = torch.randn(1, channels, side, side)
        pooled = nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=classes == 1000)
        if (classes, block) == (1008, "Mixed_7c"):
            pooled = nn.functional.max_pool2d(x, 3, 1, 1)
        conv = part.get_submodule("branch_pool.conv")
        expected = part.get_submodule("branch_pool.bn")(conv(pooled)).relu()
        torch.testing.assert_close(part(x)[:, -expected.shape[1] :], expected)
    with pytest.raises(ConfigError, match="values from 0 to 1"):
        features(2 * grey)
