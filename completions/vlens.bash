_vlens_completion() {
    local IFS=$'\n' response type value
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
