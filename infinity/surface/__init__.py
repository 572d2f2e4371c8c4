"""Wiring: what a user imports."""
