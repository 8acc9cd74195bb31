"""A model's blocks in the order they run in, recorded by running the model once on the meta device."""
