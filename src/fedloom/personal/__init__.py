"""Which parameters are shared and which private."""

from fedloom.personal.private import Body, Everything, Head

__all__ = ["Body", "Everything", "Head"]
