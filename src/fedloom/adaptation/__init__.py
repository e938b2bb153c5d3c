"""How a model fits itself to a client before it is used; so far only the identity, which lives in the core."""
