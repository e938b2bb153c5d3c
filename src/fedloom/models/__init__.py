"""Networks by name; classifiers have ``features`` and a linear ``head``.

>>> len(models.names())
38
>>> models.make("mlp", classes=3, inputs=(2,), hidden=(4,)).head
Linear(in_features=4, out_features=3, bias=True)
"""

from typing import TYPE_CHECKING

from fedloom.models.classifier import Classifier, macs, models

if TYPE_CHECKING:
    from fedloom.models.adapters import Copies, Wrapped, distilbert, efficientnet_b0, timm, transformer, wrap
    from fedloom.models.deep import (
        energy_resnet,
        mobilenet,
        mobilenet_v2,
        preact_exit18,
        preact_resnet18,
        preact_resnet34,
        resnet8x4,
        resnet10,
        resnet10_l,
        resnet10_m,
        resnet10_s,
        resnet10_xs,
        resnet10_xxs,
        resnet18,
        resnet32x4,
        resnet34,
        shufflenet_v2,
        wide_resnet,
    )  # fmt: skip
    from fedloom.models.early_exit import EarlyExit, Shallow, exit_cnn, in_exit
    from fedloom.models.generative import ACGAN, ConditionalGAN, ConditionalVAE
    from fedloom.models.layers import SpectralLinear
    from fedloom.models.plain import (
        energy_cnn,
        feddyn_cnn,
        fedssa_cnn,
        leaf_cnn,
        logistic,
        m5,
        mlp,
        stacked_lstm,
        two_cnn,
        two_nn,
        two_nn_superfed,
        vgg9,
    )

__all__ = [
    "ACGAN", "Classifier", "ConditionalGAN", "ConditionalVAE", "Copies", "EarlyExit", "Shallow", "SpectralLinear",
    "Wrapped", "distilbert", "efficientnet_b0", "energy_cnn", "energy_resnet", "exit_cnn", "feddyn_cnn",
    "fedssa_cnn", "in_exit", "leaf_cnn", "logistic", "m5", "macs", "make", "mlp", "mobilenet", "mobilenet_v2",
    "models", "preact_exit18", "preact_resnet18", "preact_resnet34", "resnet8x4", "resnet10", "resnet10_l",
    "resnet10_m", "resnet10_s", "resnet10_xs", "resnet10_xxs", "resnet18", "resnet32x4", "resnet34",
    "shufflenet_v2", "stacked_lstm", "timm", "transformer", "two_cnn", "two_nn", "two_nn_superfed", "vgg9",
    "wide_resnet", "wrap",
]  # fmt: skip

make = models.make
__getattr__ = models.lazily(
    __name__,
    {
        "efficientnet_b0": "adapters.efficientnet_b0",
        "timm": "adapters.timm",
        "transformers": "adapters.transformer",
        "distilbert": "adapters.distilbert",
        "two_cnn": "plain.two_cnn",
        "feddyn_cnn": "plain.feddyn_cnn",
        "fedssa_cnn": "plain.fedssa_cnn",
        "leaf_cnn": "plain.leaf_cnn",
        "vgg9": "plain.vgg9",
        "energy_cnn": "plain.energy_cnn",
        "exit_cnn": "early_exit.exit_cnn",
        "conditional_vae": "generative.ConditionalVAE",
        "conditional_gan": "generative.ConditionalGAN",
        "acgan": "generative.ACGAN",
        "mobilenet": "deep.mobilenet",
        "mobilenet_v2": "deep.mobilenet_v2",
        "shufflenet_v2": "deep.shufflenet_v2",
        "logistic": "plain.logistic",
        "mlp": "plain.mlp",
        "two_nn": "plain.two_nn",
        "two_nn_superfed": "plain.two_nn_superfed",
        "preact_resnet18": "deep.preact_resnet18",
        "preact_resnet34": "deep.preact_resnet34",
        "preact_exit18": "deep.preact_exit18",
        "wide_resnet": "deep.wide_resnet",
        "resnet34": "deep.resnet34",
        "resnet18": "deep.resnet18",
        "resnet10": "deep.resnet10",
        "resnet10_l": "deep.resnet10_l",
        "resnet10_m": "deep.resnet10_m",
        "resnet10_s": "deep.resnet10_s",
        "resnet10_xs": "deep.resnet10_xs",
        "resnet10_xxs": "deep.resnet10_xxs",
        "resnet8x4": "deep.resnet8x4",
        "resnet32x4": "deep.resnet32x4",
        "energy_resnet": "deep.energy_resnet",
        "stacked_lstm": "plain.stacked_lstm",
        "m5": "plain.m5",
    },
    "early_exit.EarlyExit",
    "early_exit.Shallow",
    "early_exit.in_exit",
    "layers.SpectralLinear",
    "adapters.Copies",
    "adapters.Wrapped",
    "adapters.wrap",
)
