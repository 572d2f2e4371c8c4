"""Random models, loops and placements, each compared with plain torch. `python -m tests.fuzz.run --help`."""
