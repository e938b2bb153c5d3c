"""``fedloom completion``: a script to complete commands, keys and names, without starting Python at each key press."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping

from fedloom.base.errors import ConfigError, nearest
from fedloom.base.settings import signature
from fedloom.cli import commands
from fedloom.cli.catalogue import KINDS, SCHEMAS, names_of
from fedloom.config.keys import RUN
from fedloom.config.schema import CommandSchema
from fedloom.config.sections import Choice, Record, Section
from fedloom.data import sources

BASH = """_fedloom() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" found
    local current="${{line##* }}"
    case "$line" in
{cases}
        *) found="{commands}" ;;
    esac
    COMPREPLY=($(compgen -W "$found" -- "$current"))
    [[ ${{#COMPREPLY[@]}} == 0 ]] && COMPREPLY=($(compgen -f -- "${{current##*=}}"))
    if [[ "$current" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then  # bash replaces only what follows the =
        COMPREPLY=("${{COMPREPLY[@]#"${{current%=*}}="}}")
    fi
    [[ ${{#COMPREPLY[@]}} == 1 && "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
}}
complete -o default -F _fedloom fedloom
"""
ZSH = """#compdef fedloom
_fedloom() {{
    local found
    case "$words[1,CURRENT-1] " in
{cases}
        *) found="{commands}" ;;
    esac
    local -a all=(${{${{=found}}:#$PREFIX}})
    compadd -S '' -- ${{(M)all:#*=}}  # a value follows at once
    compadd -- ${{all:#*=}}
    (( compstate[nmatches] )) || {{ compset -P '*='; _files }}
}}
if [[ $funcstack[1] == _fedloom ]]; then  # from a folder in fpath
    _fedloom "$@"
else
    (( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
    compdef _fedloom fedloom
fi
"""
SHELLS = {"bash": BASH, "zsh": ZSH}


def command(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    shell = arguments.words[0] if arguments.words else ""
    if shell not in SHELLS or len(arguments.words) > 1:
        raise ConfigError(f"fedloom completion takes the name of a shell; {nearest(shell, SHELLS)}")
    schemas = {schema.command.partition(" ")[0]: schema for schema in SCHEMAS}
    cases = (f'        *"fedloom {name} "*) found="{" ".join(words(name, schemas))}" ;;' for name in commands())
    print(SHELLS[shell].format(cases="\n".join(cases), commands=" ".join((*commands(), "help"))), end="")
    return 0


def words(name: str, schemas: Mapping[str, CommandSchema]) -> Iterator[str]:
    """All words of a command: subcommands, options, keys, and names where a key takes one."""
    yield from dict.fromkeys(
        re.findall(rf"(?m)^(?:usage:|      ) fedloom {name} ([a-z]+)\b(?!=)", commands()[name].help)
    )
    for option in commands()[name].options:
        yield option.rstrip("=").split()[-1]
    if name == "list":
        yield from KINDS
        yield from sorted({name for kind in KINDS for name in names_of(kind)})
    elif name in ("data", "partition", *schemas):
        if name == "data":
            yield from sources.names()
        yield from ("out=", "resume=")
        for key, section in schemas.get(name, RUN).sections.items():
            yield from keys(key, section)


def keys(key: str, section: Section) -> Iterator[str]:
    """The words that begin with a key."""
    if isinstance(section, Choice):
        yield from (f"{key}={name}" for name in section.registry.names())
        yield from sorted({f"{key}.{p}=" for name in section.registry.names() for p in section.parameters(name)})
        for slot, choice in section.slots.items():
            yield from keys(f"{key}.{slot}", choice)
    elif isinstance(section, Record):
        yield from (f"{key}.{name}=" for name in signature(section.factory))
    else:
        yield f"{key}="
