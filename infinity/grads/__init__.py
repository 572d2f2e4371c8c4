"""Gradients, from autograd to their tier."""
