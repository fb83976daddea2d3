"""Shell completion of commands, experiments, groups and options.

    source <(ringspan completion bash)      # or add the line to ~/.bashrc
    source <(ringspan completion zsh)

The printed script calls `ringspan completion words …` at each Tab, which imports no torch.
"""

import sys

from ringspan.trainer.config.help import CONF, group_choices, option_names

PROGRAM = "ringspan completion"
CONFIG_COMMANDS = ("launch", "train", "check")  # their arguments are options of a run
FLAGS = ("--help", "--cfg", "--config-dir=", "--multirun", "--ranks=")
BASH = """\
_ringspan() {
  local line=${COMP_LINE:0:COMP_POINT}
  mapfile -t COMPREPLY < <(ringspan completion words "${line#* }" 2>/dev/null)
  [[ ${COMPREPLY[0]} == *= || ${COMPREPLY[0]} == *. ]] && compopt -o nospace
}
complete -o default -F _ringspan ringspan
"""
# bash splits words at =, and zsh is told to with compset, so that values come without their option.
ZSH = """\
autoload -Uz compinit && compinit
_ringspan() {
  local -a found
  [[ $PREFIX == *=* ]] && compset -P '*='
  found=("${(@f)$(ringspan completion words "${LBUFFER#* }" 2>/dev/null)}")
  compadd -S '' -- $found
}
compdef _ringspan ringspan
"""


def complete(line: str) -> list[str]:
    """Return the completions of the last word of a command line, without `ringspan`.

    Args:
        line: the line up to the cursor.
    """
    from ringspan.__main__ import COMMANDS  # the console script, which imports this module when it runs it

    *before, word = line.split(" ")
    before = [each for each in before if each]
    name = " ".join(before[:2]) if before[:1] == ["bench"] else "".join(before[:1])
    if name not in COMMANDS:
        prefix = f"{name} " if before[:1] == ["bench"] else ""
        names = [
            command.removeprefix("bench ") if prefix else command.partition(" ")[0]
            for command in COMMANDS
            if command.startswith(prefix)
        ]
        return [each for each in dict.fromkeys(names) if each.startswith(word)]
    if name == "completion":
        return [shell for shell in ("bash", "zsh") if shell.startswith(word)]
    if name not in CONFIG_COMMANDS:
        return []
    key, equals, value = word.partition("=")
    if equals:
        return (
            [f"{key}={choice}" for choice in group_choices(key, [CONF]) if choice.startswith(value)] if "." not in key else []
        )
    groups = [f"{path.name}=" for path in sorted(CONF.iterdir()) if path.is_dir()]
    words = [*FLAGS, "model.from=", *groups, *(f"{option}=" for option in option_names())]
    return [each for each in dict.fromkeys(words) if each.startswith(word)]


def main(argv: list[str] | None = None) -> int:
    """Print a shell's script, or the completions of a line."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 2 and argv[0] == "words":
        line = argv[1]
        found = complete(line)
        word = line.rpartition(" ")[2]
        key = word.rpartition("=")[0] + "=" if "=" in word else ""
        print(*(each.removeprefix(key) for each in found), sep="\n")
        return 0
    if argv in (["bash"], ["zsh"]):
        print({"bash": BASH, "zsh": ZSH}[argv[0]], end="")
        return 0
    wants_help = argv[:1] in (["--help"], ["-h"])
    text = f"usage: {PROGRAM} bash|zsh\n\n{__doc__}" if wants_help else f"{PROGRAM}: {' '.join(argv)!r}: it takes bash or zsh"
    print(text, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


if __name__ == "__main__":
    raise SystemExit(main())
