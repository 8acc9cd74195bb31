"""The real sharded model without values: the child processes of `smp plan --dry-run` and of a plan's traces."""
