"""The newest state in shared memory: a restart goes on from there, and a lost node's state from the next node."""
