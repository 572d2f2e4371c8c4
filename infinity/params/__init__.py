"""How parameters come and go."""
