"""Experiments that chose the defaults: `python -m examples.experiments language|image|lamb|all`."""
