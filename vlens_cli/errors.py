"""Every error that vlens shows, as one tree.

    VlensError
    ├── UsageError     exit 2: what was typed is wrong, by itself or for this model
    │   ├── HookError      a hook name: unknown, refused, or out of range for this model
    │   ├── PromptError    a prompt: missing, empty, too long, not tokenizable
    │   └── PathError      a file or folder that was named: missing, read-only, malformed
    ├── QueryError     exit 1: accepted, then failed or timed out
    ├── StartError     exit 3: the model or the engine did not start
    └── BugError       exit 4: vlens is wrong

A foreign exception becomes one of these once, at the seam where the foreign library is called.
`message` is one line that says what is true; `hint` says what to type, or is empty.
`code` is a stable snake_case word for scripts.
"""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_START = 3
EXIT_BUG = 4
EXIT_INTERRUPTED = 130

LOG_HINT = "`vlens engine log` shows what the engine said; with --no-daemon, VLENS_LOG=1 does"
INSTALL_HINT = "pip install 'vlens_cli[cpu]' for this machine's processor, or 'vlens_cli[cuda]' for NVIDIA GPUs"


def how_ended(code: int) -> str:
    """How a process ended, by its exit code as Python gives it: below 0 a signal."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


class VlensError(Exception):
    """Base of the tree; never raised itself."""

    exit_code = EXIT_BUG
    default_code = "error"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code

    def __str__(self) -> str:
        # Who passes an error on may add where it happened.
        return self.message

    def as_dict(self) -> dict[str, str]:
        """The error object of `--json`: code, message, hint."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


class UsageError(VlensError):
    """What was typed is wrong, by itself or for this model."""

    exit_code = EXIT_USAGE
    default_code = "usage"


class HookError(UsageError):
    """A hook name that is unknown, refused, or out of range for this model."""

    default_code = "unknown_hook"


class PromptError(UsageError):
    """A prompt that is missing, empty, too long or not tokenizable."""

    default_code = "bad_prompt"


class PathError(UsageError):
    """A file or folder that was named and cannot be used."""

    default_code = "bad_path"


class QueryError(VlensError):
    """The query was accepted, then failed or timed out."""

    exit_code = EXIT_FAILED
    default_code = "query_failed"


class StartError(VlensError):
    """The model or the engine did not start."""

    exit_code = EXIT_START
    default_code = "start_failed"


class BugError(VlensError):
    """vlens itself is wrong."""

    exit_code = EXIT_BUG
    default_code = "bug"
