"""The zoo: networks by name, each with ``features`` and a linear ``head``.

>>> sorted(models.names())
['feddyn_cnn', 'logistic', 'mlp', 'resnet18', 'two_cnn', 'two_nn']
>>> models.make("mlp", classes=3, inputs=(2,), hidden=(4,)).head
Linear(in_features=4, out_features=3, bias=True)
"""

from fedloom.models.classifier import Classifier, models
from fedloom.models.convolutional import feddyn_cnn, two_cnn
from fedloom.models.linear import logistic
from fedloom.models.perceptron import mlp, two_nn
from fedloom.models.residual import resnet18

__all__ = ["Classifier", "feddyn_cnn", "logistic", "mlp", "models", "resnet18", "two_cnn", "two_nn"]
