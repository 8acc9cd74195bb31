"""The real sharded model without values: the child processes of `smp plan --dry-run`
and of a plan's traces.

step runs a step of rank 0 in a fake process group, split_trace traces whole and split
layers; without_values stands in for values, other ranks and devices, allocations counts
the memory that fake tensors would take.
"""
