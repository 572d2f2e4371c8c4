"""Pure arithmetic: no I/O, no CUDA, no process group."""
