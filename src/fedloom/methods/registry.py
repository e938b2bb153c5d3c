"""The registry that named methods file themselves in."""

from fedloom.core.method import Method
from fedloom.core.registry import Registry

methods: Registry[Method] = Registry("method")
