"""When all of that happens."""
