"""`python -m infinity`."""

from __future__ import annotations

from infinity.tools.cli import main

if __name__ == "__main__":
    main()
