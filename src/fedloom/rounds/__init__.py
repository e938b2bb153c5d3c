"""The computation of a federated round: the local work of clients, the sums of what they send, the server's steps.

This package imports ``fedloom.core`` and ``fedloom.base`` alone. Reading order: ``plan`` (what a method, a model and
data make of a client's work), ``client`` (local work), ``round`` (the server).
"""
