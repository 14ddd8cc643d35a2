"""Transports: one module a broker, each independent of the others."""
