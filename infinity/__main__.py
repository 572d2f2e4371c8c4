"""`infinity` and `python -m infinity`."""

from __future__ import annotations

from infinity.cli.ending import end_on_signals
from infinity.cli.streams import take_streams


def main() -> None:
    """The entry point. What it imports takes a while, in which it may be ended already."""
    take_streams()
    end_on_signals()
    from infinity.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
