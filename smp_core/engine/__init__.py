"""The engine: everything about one model is decided once, then done once."""
