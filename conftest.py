"""Doctests are not looked for in modules whose library is not installed."""

from importlib.util import find_spec

FLOWER = ("grid", "objects", "supernode")
collect_ignore = [] if find_spec("flwr") else [f"src/fedloom_apps/deploy/flower/{name}.py" for name in FLOWER]
