"""Random runs: knobs, models and training procedures drawn from seeds, compared with
one process in float64."""
