"""Pipeline stages: a model's blocks dealt out to stretches of ranks."""
