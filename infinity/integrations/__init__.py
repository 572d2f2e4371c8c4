"""Libraries whose loops and files the engine fits into. Nothing else imports them, but the command line."""
