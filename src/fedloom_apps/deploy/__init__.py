"""Deployment: the same methods with real clients, which hold their own data and states (docs/deploy.md).

A server runs the ordinary round with an engine that sends messages (``engine``); a node answers them (``node``).
Messages hold settings by name and tensors (``messages``, ``wire``); a ``Transport`` carries them, for real deployments
``flower``.
"""
