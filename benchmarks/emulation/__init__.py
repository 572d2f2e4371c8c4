"""A training step on a modelled machine with a GPU: what `emulated.py` stands on."""
