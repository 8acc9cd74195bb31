"""The activations that forward keeps for backward: recomputed, or offloaded to host memory."""
