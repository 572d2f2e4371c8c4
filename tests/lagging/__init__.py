"""CUDA over the CPU's memory, late: see world.py."""
