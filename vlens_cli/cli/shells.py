"""The scripts that teach bash, zsh and fish to complete vlens, and the two sides of what they say to each other.

Click's protocol (`_VLENS_COMPLETE=bash_complete`, COMP_WORDS, COMP_CWORD) and its reading of the command line; the scripts
are ours, because Click's drop the names where folders are offered beside them, cut a value at its second comma in fish
(`blocks.{0,5}`), lose `--hook=` in zsh and fish, and put a space behind a name that goes on.
"""

from __future__ import annotations

from typing import Any

from click.shell_completion import (
    BashComplete, CompletionItem, FishComplete, ZshComplete, add_completion_class,
)

# Only bash from 4.4 on has `nosort`.
BASH = """\
_vlens_completion() {
    local IFS=$'\\n' response type value
    COMPREPLY=()
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" _VLENS_COMPLETE=bash_complete "$1" 2>/dev/null)
    while IFS=',' read -r type value; do
        case "$type" in
            dir) compopt -o plusdirs ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$response"
    # A name that goes on.
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]]; then
        compopt -o nospace
    fi
}

complete -o nosort -F _vlens_completion vlens
"""

ZSH = """\
#compdef vlens

_vlens_completion() {
    local -a named described open response
    local type key descr
    (( ! $+commands[vlens] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) _VLENS_COMPLETE=zsh_complete vlens 2>/dev/null)}")

    for type key descr in ${response}; do
        if [[ "$type" == "plain" && "$key" == *. ]]; then
            open+=("$key")
        elif [[ "$type" == "plain" && "$descr" == "_" ]]; then
            named+=("$key")
        elif [[ "$type" == "plain" ]]; then
            described+=("$key":"$descr")
        elif [[ "$type" == "dir" || "$type" == "file" ]]; then
            compset -P '--*='
            [[ "$type" == "dir" ]] && _path_files -/ || _path_files -f
        fi
    done

    [[ -n "$described" ]] && _describe -V unsorted described -U
    [[ -n "$named" ]] && compadd -U -V unsorted -a named
    # Names that go on.
    [[ -n "$open" ]] && compadd -U -S '' -V unsorted -a open
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    # Found along fpath.
    _vlens_completion "$@"
else
    compdef _vlens_completion vlens
fi
"""

FISH = """\
function _vlens_completion
    set -l response (env _VLENS_COMPLETE=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) vlens 2>/dev/null)

    for completion in $response
        set -l parts (string split -m 1 "," -- $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case plain
                echo $parts[2]
        end
    end
end

complete --no-files --command vlens --arguments "(_vlens_completion)"
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class Bash(BashComplete):
    """bash breaks words at `=`, and hands over what stands between as a word."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        return [arg for arg, before in zip(args, ["", *args], strict=False)
                if not (arg == "=" and before.startswith("--"))], incomplete


def _whole(items: list[CompletionItem[Any]], incomplete: str) -> list[CompletionItem[Any]]:
    """With the `--hook=` that stands before the value in the same word, which zsh and fish replace as a whole."""
    option, equals, _ = incomplete.partition("=")
    for item in items if option.startswith("--") and equals else ():
        item.value = f"{option}={item.value}" if item.type == "plain" else item.value
    return items


class Zsh(ZshComplete):
    source_template = ZSH

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        return _whole(super().get_completions(args, incomplete), incomplete)


class Fish(FishComplete):
    source_template = FISH

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        return _whole(super().get_completions(args, incomplete), incomplete)


def register() -> None:
    """Let Click answer these scripts."""
    for kind in (Bash, Zsh, Fish):
        add_completion_class(kind)
