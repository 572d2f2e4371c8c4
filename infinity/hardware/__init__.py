"""One file per piece of hardware; the only importers of the native modules."""
