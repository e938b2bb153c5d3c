"""Networks by name; classifiers have ``features`` and a linear ``head``.

>>> len(models.names())
38
>>> models.make("mlp", classes=3, inputs=(2,), hidden=(4,)).head
Linear(in_features=4, out_features=3, bias=True)
"""

from typing import TYPE_CHECKING

from fedloom.models.classifier import Classifier, macs, models

if TYPE_CHECKING:
    from fedloom.models.adapters import distilbert, efficientnet_b0, timm, transformer
    from fedloom.models.convolutional import energy_cnn, feddyn_cnn, fedssa_cnn, leaf_cnn, two_cnn, vgg9
    from fedloom.models.early_exit import EarlyExit, Shallow, exit_cnn, in_exit
    from fedloom.models.generative import ACGAN, ConditionalGAN, ConditionalVAE
    from fedloom.models.layers import SpectralLinear
    from fedloom.models.mobile import mobilenet, mobilenet_v2, shufflenet_v2
    from fedloom.models.perceptron import logistic, mlp, two_nn, two_nn_superfed
    from fedloom.models.preactivated import preact_exit18, preact_resnet18, preact_resnet34, wide_resnet
    from fedloom.models.residual import (
        energy_resnet,
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
    )  # fmt: skip
    from fedloom.models.sequences import m5, stacked_lstm
    from fedloom.models.wrapped import Copies, Wrapped, wrap

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
        "two_cnn": "convolutional.two_cnn",
        "feddyn_cnn": "convolutional.feddyn_cnn",
        "fedssa_cnn": "convolutional.fedssa_cnn",
        "leaf_cnn": "convolutional.leaf_cnn",
        "vgg9": "convolutional.vgg9",
        "energy_cnn": "convolutional.energy_cnn",
        "exit_cnn": "early_exit.exit_cnn",
        "conditional_vae": "generative.ConditionalVAE",
        "conditional_gan": "generative.ConditionalGAN",
        "acgan": "generative.ACGAN",
        "mobilenet": "mobile.mobilenet",
        "mobilenet_v2": "mobile.mobilenet_v2",
        "shufflenet_v2": "mobile.shufflenet_v2",
        "logistic": "perceptron.logistic",
        "mlp": "perceptron.mlp",
        "two_nn": "perceptron.two_nn",
        "two_nn_superfed": "perceptron.two_nn_superfed",
        "preact_resnet18": "preactivated.preact_resnet18",
        "preact_resnet34": "preactivated.preact_resnet34",
        "preact_exit18": "preactivated.preact_exit18",
        "wide_resnet": "preactivated.wide_resnet",
        "resnet34": "residual.resnet34",
        "resnet18": "residual.resnet18",
        "resnet10": "residual.resnet10",
        "resnet10_l": "residual.resnet10_l",
        "resnet10_m": "residual.resnet10_m",
        "resnet10_s": "residual.resnet10_s",
        "resnet10_xs": "residual.resnet10_xs",
        "resnet10_xxs": "residual.resnet10_xxs",
        "resnet8x4": "residual.resnet8x4",
        "resnet32x4": "residual.resnet32x4",
        "energy_resnet": "residual.energy_resnet",
        "stacked_lstm": "sequences.stacked_lstm",
        "m5": "sequences.m5",
    },
    "early_exit.EarlyExit",
    "early_exit.Shallow",
    "early_exit.in_exit",
    "layers.SpectralLinear",
    "wrapped.Copies",
    "wrapped.Wrapped",
    "wrapped.wrap",
)
