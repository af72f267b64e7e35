"""`vlens completions`: the script that teaches a shell to complete vlens."""

from __future__ import annotations

import click

from vlens_cli.cli import output

# Shell -> its file in completions/, named as each shell's own search path wants it.
SHELLS = {"bash": "vlens.bash", "zsh": "_vlens", "fish": "vlens.fish"}


@click.command("completions")
@click.argument("shell", type=click.Choice(list(SHELLS)))
def command(shell: str) -> None:
    """The completion script for SHELL, which asks vlens at each TAB.

    \b
    eval "$(vlens completions bash)"      # in ~/.bashrc
    eval "$(vlens completions zsh)"       # in ~/.zshrc, after compinit
    vlens completions fish | source       # in ~/.config/fish/config.fish
    """
    output.emit(script(shell))


def script(shell: str) -> str:
    """Without its last line end."""
    from vlens_cli.cli import shells

    return shells.SCRIPTS[shell].strip()
