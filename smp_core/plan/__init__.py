"""What was decided, as data: no process group, no module, no collective."""
