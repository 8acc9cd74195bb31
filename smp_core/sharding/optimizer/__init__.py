"""Optimizers over shards: which may step them, their norms, scales and states."""
