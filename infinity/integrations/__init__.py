"""Libraries whose loops and files the engine fits into. Each module needs its library."""
