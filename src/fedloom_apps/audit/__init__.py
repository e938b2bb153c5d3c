"""What the hostile and the curious can do: attacks by clients, membership inference."""
