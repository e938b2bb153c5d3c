"""How a block of clients is stepped: one live module, or many clients in one batched pass."""
