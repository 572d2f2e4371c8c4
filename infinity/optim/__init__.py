"""From the tier to new values."""
