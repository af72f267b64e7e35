"""`vlens completions`: the script that teaches a shell to complete vlens."""

from __future__ import annotations

import click

from vlens_cli.cli import output

# Shell -> its file in completions/, named as each shell's own search path wants it.
SHELLS = {"bash": "vlens.bash", "zsh": "_vlens", "fish": "vlens.fish"}


@click.command("completions")
@click.argument("shell", type=click.Choice(list(SHELLS)))
def command(shell: str) -> None:
    """The completion script for SHELL.

    \b
    eval "$(vlens completions bash)"
    eval "$(vlens completions zsh)"
    vlens completions fish | source
    """
    output.emit(script(shell))


def script(shell: str) -> str:
    """Click's script: it calls vlens at each TAB, so it changes only when Click's template does."""
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # SHELLS are the three that Click knows
    # Not kind.source(): for bash that runs bash, and warns where it is missing or old.
    return ShellComplete.source(kind(None, {}, "vlens", "_VLENS_COMPLETE")).strip()
