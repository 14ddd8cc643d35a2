"""Straight-line flows over the protocols: no tasks, no sleeps, no threads."""
