"""What hostile clients and curious observers can do: attacks, and membership inference."""
