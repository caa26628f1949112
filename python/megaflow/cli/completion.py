"""`megaflow completion SHELL`: prints what lets a shell complete commands and flags."""

import argparse
from collections.abc import Sequence

from megaflow.cli import exit_codes
from megaflow.cli.arguments import Parser

BASH = """_megaflow() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} program=("${{COMP_WORDS[0]}}")
    COMPREPLY=()
    if [[ ${{COMP_WORDS[0]##*/}} == megaflow && $COMP_CWORD == 1 ]]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
    elif [[ $current == -* ]]; then
        [[ ${{COMP_WORDS[0]##*/}} == megaflow ]] && program+=("${{COMP_WORDS[1]}}")
        COMPREPLY=($(compgen -W "$("${{program[@]}}" --help 2>/dev/null |
            grep -oE -- '--[a-z0-9][a-z0-9_-]*' | sort -u)" -- "$current"))
    fi
}}
complete -o default -F _megaflow megaflow megaflow-preprocess
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + BASH
FISH = """complete -c megaflow -n __fish_use_subcommand -a "{commands}"
function __megaflow_flags
    $argv --help 2>/dev/null | string match -ra -- '--[a-z0-9][a-z0-9_-]*' | sort -u
end
complete -c megaflow -n "not __fish_use_subcommand" -a "(__megaflow_flags (commandline -opc)[1..2])"
complete -c megaflow-preprocess -a "(__megaflow_flags megaflow-preprocess)"
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
USE = """put this into ~/.bashrc (~/.zshrc, ~/.config/fish/config.fish):
  eval "$(megaflow completion bash)"
  eval "$(megaflow completion zsh)"
  megaflow completion fish | source"""


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow completion") -> int:
    """The command.

    Returns:
        The exit code.
    """

    def work() -> None:
        from megaflow.cli.main import COMMANDS

        parser = Parser(
            prog=prog,
            description="Completion of commands and flags for a shell.",
            epilog=USE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")
        shell = parser.parse(arguments).shell
        print(SHELLS[shell].format(commands=" ".join(COMMANDS)), end="")

    return exit_codes.run(prog, work)
