"""The log of a run: JSON lines of one format, written by all monitors, read as a stranger's data."""
