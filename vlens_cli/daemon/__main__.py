"""`python -m vlens_cli.daemon FOLDER SPEC KEEP_ALIVE`: see server.main."""

import sys

from vlens_cli.daemon.server import main

if __name__ == "__main__":
    main(*sys.argv[1:])
