"""What all packages of FedLoom build on: errors, ranges and settings, registries, files, random streams.

Nothing here knows what a client is.
"""
