"""Folders that checkpoints are written to: one interface, POSIX folders and object stores."""
