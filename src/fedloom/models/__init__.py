"""Networks by name; classifiers have ``features`` and a linear ``head``.

>>> len(models.names())
39
>>> models.make("mlp", classes=3, inputs=(2,), hidden=(4,)).head
Linear(in_features=4, out_features=3, bias=True)
"""

from typing import TYPE_CHECKING

from fedloom.models.classifier import Classifier as Classifier
from fedloom.models.classifier import macs as macs
from fedloom.models.classifier import models as models

if TYPE_CHECKING:
    # isort: off
    from fedloom.models.adapters import (
        Copies as Copies, Wrapped as Wrapped, distilbert as distilbert, efficientnet_b0 as efficientnet_b0,
        timm as timm, transformer as transformer, wrap as wrap,
    )  # fmt: skip
    from fedloom.models.deep import (
        energy_resnet as energy_resnet, mobilenet as mobilenet, mobilenet_v2 as mobilenet_v2,
        preact_exit18 as preact_exit18, preact_resnet18 as preact_resnet18, preact_resnet34 as preact_resnet34,
        resnet8x4 as resnet8x4, resnet10 as resnet10, resnet10_l as resnet10_l, resnet10_m as resnet10_m,
        resnet10_s as resnet10_s, resnet10_xs as resnet10_xs, resnet10_xxs as resnet10_xxs, resnet18 as resnet18,
        resnet32x4 as resnet32x4, resnet34 as resnet34, shufflenet_v2 as shufflenet_v2, wide_resnet as wide_resnet,
    )  # fmt: skip
    from fedloom.models.adapters import Several as Several, several as several
    from fedloom.models.early_exit import (
        EarlyExit as EarlyExit, Shallow as Shallow, exit_cnn as exit_cnn, in_exit as in_exit,
    )  # fmt: skip
    from fedloom.models.generative import (
        ACGAN as ACGAN, ConditionalGAN as ConditionalGAN, ConditionalVAE as ConditionalVAE,
    )  # fmt: skip
    from fedloom.models.layers import SpectralLinear as SpectralLinear
    from fedloom.models.plain import (
        energy_cnn as energy_cnn, feddyn_cnn as feddyn_cnn, fedssa_cnn as fedssa_cnn, leaf_cnn as leaf_cnn,
        logistic as logistic, m5 as m5, mlp as mlp, stacked_lstm as stacked_lstm, two_cnn as two_cnn, two_nn as two_nn,
        two_nn_superfed as two_nn_superfed, vgg9 as vgg9,
    )  # fmt: skip

make = models.make
__getattr__ = models.register_lazily(
    __name__,
    [
        "adapters.efficientnet_b0", "adapters.timm", "transformers=adapters.transformer", "adapters.distilbert",
        "plain.two_cnn", "plain.feddyn_cnn", "plain.fedssa_cnn", "plain.leaf_cnn", "plain.vgg9", "plain.energy_cnn",
        "early_exit.exit_cnn", "conditional_vae=generative.ConditionalVAE", "conditional_gan=generative.ConditionalGAN",
        "generative.ACGAN", "deep.mobilenet", "deep.mobilenet_v2", "deep.shufflenet_v2", "plain.logistic", "plain.mlp",
        "plain.two_nn", "plain.two_nn_superfed", "deep.preact_resnet18", "deep.preact_resnet34", "deep.preact_exit18",
        "deep.wide_resnet", "deep.resnet34", "deep.resnet18", "deep.resnet10", "deep.resnet10_l", "deep.resnet10_m",
        "deep.resnet10_s", "deep.resnet10_xs", "deep.resnet10_xxs", "deep.resnet8x4", "deep.resnet32x4",
        "deep.energy_resnet", "plain.stacked_lstm", "plain.m5", "adapters.several",
    ],
    "early_exit.EarlyExit", "early_exit.Shallow", "early_exit.in_exit", "layers.SpectralLinear", "adapters.Copies",
    "adapters.Wrapped", "adapters.wrap", "adapters.Several",
)  # fmt: skip
