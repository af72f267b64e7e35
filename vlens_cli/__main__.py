"""The entry point: `vlens`, and `python -m vlens_cli`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    # A command is over before garbage matters, and looking for it takes a tenth of its start. An engine in this process
    # turns it on again.
    gc.disable()
    if sys.argv[1:2] == ["param"]:
        # Its numpy takes longer to import than everything else that the command does.
        from vlens_cli.reader import launch

        launch.begin(sys.argv[2:])
    from vlens_cli.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
