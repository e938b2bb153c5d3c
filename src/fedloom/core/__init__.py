"""The algebra: trees, parts, methods, client work and the round. Imports nothing else of FedLoom."""
