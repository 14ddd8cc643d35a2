"""Runs flows: threads, signals, leases, processes."""
