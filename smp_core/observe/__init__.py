"""Figures of a run: rates and bytes of the whole job, memory by kind, seconds by part of a step, router loads."""
