"""What forward leaves behind for backward: recomputed, or parked in host memory."""
