"""Layers over several ranks: tensor parallelism with sequence parallelism."""
