"""Checkpoints of other programs, in and out, read without running their code."""
