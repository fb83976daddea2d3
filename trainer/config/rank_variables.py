"""The environment variables with which a launcher tells a process its rank, and what is wrong with them. Imports no torch."""

import os

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
OTHERS = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
REMEDY = "unset the variables of the other launcher, or start with `ringspan launch` or torchrun"


def problem(joins: bool = False) -> str:
    """Return what is wrong with the variables, in one line, or "".

    Args:
        joins: the process is about to wait for the other ranks.
    """
    values = {name: os.environ[name] for name in NUMBERS if name in os.environ}
    if wrong := [f"{name}={text!r}" for name, text in values.items() if not (text.isascii() and text.isdecimal())]:
        return f"{', '.join(wrong)}: not a number; {REMEDY}"
    rank, world = int(values.get("RANK", 0)), int(values.get("WORLD_SIZE", 1))
    if rank >= world:
        size = f"WORLD_SIZE={world}" if "WORLD_SIZE" in values else "WORLD_SIZE unset, which stands for 1"
        return f"RANK={rank}, {size}: a rank is below the number of ranks; {REMEDY}"
    missing = [name for name in ("RANK", "MASTER_PORT") if name not in values]
    if joins and world > 1 and missing:
        return f"WORLD_SIZE={world}: the ranks cannot find each other without {' and '.join(missing)}; {REMEDY}"
    return ""


def is_first() -> bool:
    """Return whether this process prints a message that all ranks have; also if the variables describe no job."""
    return bool(problem(joins=True)) or int(os.environ.get("RANK", 0)) == 0


def unset() -> None:
    """Remove the variables from the environment of a process that starts ranks itself."""
    for name in (*NUMBERS, *OTHERS):
        os.environ.pop(name, None)
