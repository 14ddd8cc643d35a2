"""Procession beside other packages: a module each, imported by those alone who ask for it.

A module here needs what its name says (`pip install 'procession[prometheus]'`) and the public app;
the framework itself never needs it.
"""
