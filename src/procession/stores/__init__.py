"""Stores: one module or package a database, each independent of the others."""
