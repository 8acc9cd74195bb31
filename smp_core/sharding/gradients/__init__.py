"""Gradients from the first micro-batch of a window to the optimizer step."""
