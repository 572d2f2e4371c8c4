"""`infinity` and `python -m infinity`."""

from __future__ import annotations

from infinity.cli.ending import begin


def main() -> None:
    """The entry point. What it imports takes a while, in which it may be ended already."""
    begin()
    from infinity.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
