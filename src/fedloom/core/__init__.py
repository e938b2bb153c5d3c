"""The algebra of FedLoom: parts, methods, the local work of a client and the federated round.

This package imports nothing else of FedLoom. A new method should need no change here: write a part (``fedloom.parts``)
or combine existing ones (``fedloom.methods``). Change ``core`` when a part needs a hook, a requirement (``Needs``) or a
record that does not exist yet. Reading order: ``parts`` (the hooks), ``client`` (local work), ``round`` (the server).
"""
