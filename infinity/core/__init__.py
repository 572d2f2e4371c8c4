"""Words and values: errors, sizes, the configuration."""
