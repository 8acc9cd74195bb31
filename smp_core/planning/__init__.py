"""Planning: decisions about a model and a run, made before anything is changed."""
