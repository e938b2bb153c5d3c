"""What every room of FedLoom stands on: errors, ranges and settings, registries, files, random streams.

Nothing here knows what a client is.
"""
