"""Fixtures of distillation, and the command line in this process in an empty folder."""

from __future__ import annotations

import pytest
from helpers import distilling
from helpers.commands import cli
from helpers.distilling import Problem

from fedloom_apps.distill import Splits

__all__ = ["cli"]


@pytest.fixture
def vectors() -> Problem:
    return distilling.vectors()


@pytest.fixture
def images() -> Problem:
    return distilling.images()


@pytest.fixture
def digits() -> Splits:
    return Splits.of("digits")
