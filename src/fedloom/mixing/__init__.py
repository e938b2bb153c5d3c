"""Policies that choose the mixing coefficients, one a file."""

from fedloom.mixing.uniform import Uniform

__all__ = ["Uniform"]
