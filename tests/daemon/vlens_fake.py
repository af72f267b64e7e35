"""The real command line, whose daemon is fake_daemon.py: `python vlens_fake.py ARGS...`.

Locks, sockets, fingerprints, frames, exit codes and output are the real ones, and so is the model that is resolved:
a folder with a config and a weight file that nobody loads. See fake_daemon.py for what FAKE_* variables do;
FAKE_IMPORTS names a file that gets the modules that were loaded when the process ended; FAKE_KILLS is how many processes
the system had killed for want of memory, each time that it is asked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fake_daemon

from vlens_cli import memory
from vlens_cli.daemon import launch

DAEMON = Path(__file__).with_name("fake_daemon.py")


def argv(home, spec, keep_alive) -> list[str]:
    seconds = "forever" if keep_alive is None else str(keep_alive)
    return [sys.executable, str(DAEMON), str(home.folder), json.dumps(spec.as_json()), seconds]


def install() -> None:
    fake_daemon.install()
    launch.argv = argv
    # The fake needs neither torch nor vLLM.
    launch.check_installed = lambda: None
    if kills := os.environ.get("FAKE_KILLS"):
        memory.kills = iter(map(int, kills.split())).__next__


if __name__ == "__main__":
    install()
    if marker := os.environ.get("FAKE_IMPORTS"):
        leave = os._exit
        os._exit = lambda code: (Path(marker).write_text("\n".join(sys.modules), encoding="utf-8"), leave(code))
    from vlens_cli.cli.main import main

    main()
