"""Binary logistic regression with one logit: half the parameters, and half as fast as two logits."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import experiment

from fedloom.base.errors import ConfigError
from fedloom.core.local import Local
from fedloom.experiment.federated import run
from fedloom.models import models

MODEL = partial(models.make, "logistic", classes=2, inputs=(4,))


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_one_logit_at_twice_the_rate_is_two_logits(compute: str) -> None:
    """Two logits move apart by twice the step; from zero both stay opposite, so that their difference is the one."""
    predictions = []
    for one_logit, rate in ((True, 0.2), (False, 0.1)):
        conditions = experiment(
            "fedavg", federation=classes(labels=2), model=partial(MODEL, one_logit=one_logit), compute=compute,
            local=Local(epochs=2, batch_size=4, lr=rate),
        )  # fmt: skip
        model = run(conditions).model.double()
        with torch.no_grad():
            predictions.append(model(conditions.federation.test.x).softmax(1).numpy())
    np.testing.assert_allclose(*predictions, rtol=0, atol=1e-12)
    assert np.ptp(predictions[0]) > 0.1


def test_one_logit_is_for_two_classes() -> None:
    model = MODEL(one_logit=True)
    assert sum(p.numel() for p in model.parameters()) == 5
    x = torch.randn(3, 4)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert (model(x)[:, 0] == 0).all()
    with pytest.raises(ConfigError, match="one logit is for 2 classes, not 3"):
        models.make("logistic", classes=3, inputs=(4,), one_logit=True)
    with pytest.raises(ConfigError, match="with one logit is for 2 classes, not 1"):
        models.make("logistic", classes=1, inputs=(4,), one_logit=True)
