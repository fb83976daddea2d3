"""README, CONTRIBUTING and docs: commands compose or start, python snippets run, links and anchors exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ringspan.__main__ import COMMANDS
from ringspan.trainer.config import compose

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
GUIDES = ["README.md", *(page for page in PAGES if page.startswith("docs/guides/"))]
PROGRAMS = ("make", "python", "torchrun", "ringspan", "sbatch")
TRAINS = ("launch", "train", "check")  # commands whose arguments are a config
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
OF_THE_READER = ("your_training.py",)  # files that a page only names
READS_FILES = ("paths=", "tokenizer.path=", "init_from=")  # options that name the reader's files
SHORT_NAMES = ("kernels", "parallel", "trainer", "launch", "conf")  # import names of an earlier layout


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands() -> dict[str, list[str]]:
    """Command lines of blocks without a language: line → words, without the comment."""
    found = {}
    for page in PAGES:
        language = None
        for line in text_of(page).splitlines():
            if line.startswith("```"):
                language = line[3:] if language is None else None
            elif language == "" and line.partition(" ")[0] in PROGRAMS:
                command = line.partition("   ")[0]
                found[command] = shlex.split(command, comments=True)
    return found


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """A command's program, as `ringspan` commands name it, and its arguments; a module or file where it is none of them."""
    if words[0] == "sbatch":
        return "train", words[2:]
    if words[0] == "ringspan":
        size = 2 if words[1] == "bench" else 1
        return " ".join(words[1 : 1 + size]), words[1 + size :]
    rest = words[1:]
    while words[0] == "torchrun" and rest[0].startswith("--"):
        rest = rest[1:]
    if rest[0] != "-m":
        return rest[0], rest[1:]
    if rest[1] == "ringspan":
        return program_of(rest[1:])
    modules = {module.removesuffix(".__main__"): name for name, (module, _) in COMMANDS.items()}
    return modules.get(rest[1], rest[1]), rest[2:]


def ranks_of(words: list[str]) -> int:
    options = dict(word.lstrip("-").partition("=")[::2] for word in words if "=" in word)
    return int(options.get("nproc-per-node") or options.get("ranks") or options.get("hardware.gpus") or 4)


LINES = commands()
STARTED = {line: program_of(words) for line, words in LINES.items() if words[0] != "make"}
CONFIGS = [line for line, (program, _) in STARTED.items() if program in TRAINS]
OTHERS = [line for line, (program, _) in STARTED.items() if program in COMMANDS and program not in TRAINS]
FILES = [line for line, (program, _) in STARTED.items() if program not in COMMANDS]

# One process starts all programs, because importing torch takes seconds.
START_ALL = """
import contextlib, io, json, runpy, sys
answers = {}
for module, arguments in json.loads(sys.argv[1]):
    sys.argv, output, code = [module, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:
            code = repr(error)
    answers[" ".join([module, *arguments])] = code, output.getvalue()
print(json.dumps(dict(answers=answers, modules=sorted(sys.modules))))
"""


@cache
def start_all() -> dict:
    """Exit code and output of every program's --help, in both documented forms, and of the doctor; and all modules imported."""
    starts = [("ringspan", [*name.split(), "--help"]) for name in COMMANDS]
    starts += [(module.removesuffix(".__main__"), ["--help"]) for module, _ in COMMANDS.values()]
    starts += [("ringspan", ["doctor"]), ("ringspan", ["--help"])]
    done = subprocess.run(
        [sys.executable, "-c", START_ALL, json.dumps(starts)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kind_of_command_is_documented() -> None:
    assert {words[0] for words in LINES.values()} == set(PROGRAMS)
    assert {program for program, _ in STARTED.values()} >= COMMANDS.keys() - {"bench tune"} and len(CONFIGS) >= 15


@pytest.mark.parametrize("line", CONFIGS)
def test_configs_compose(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (program, arguments), ranks = STARTED[line], ranks_of(LINES[line])
    rest = [word for word in arguments if word != "--multirun" and not word.startswith("--ranks=")]
    _, overrides = compose.split_flags(rest)  # a wrong flag is an error
    planning = program == "check" or any(option in line for option in READS_FILES)
    for job in compose.sweep(overrides) if "--multirun" in arguments else [overrides]:
        assert compose.load(job, world_size=ranks, planning=planning).config.steps >= 1


@pytest.mark.parametrize("line", OTHERS)
def test_options_are_those_that_help_prints(line: str) -> None:
    program, arguments = STARTED[line]
    _, output = start_all()["answers"][f"ringspan {program} --help"]
    for word in arguments:
        option = re.match(r"--[\w-]+|[a-z_]+=", word)
        assert not option or option[0] in output, f"{program} has no {option[0]}"


@pytest.mark.parametrize("line", FILES)
def test_files_of_commands_exist(line: str) -> None:
    program, _ = STARTED[line]
    path = program.replace(".", "/") + ".py" if program.startswith("tests.") else program
    assert path in OF_THE_READER or (ROOT / path).is_file(), f"{program}: no such file or command"


@pytest.mark.parametrize("name", COMMANDS)
def test_programs_start(name: str) -> None:
    module = COMMANDS[name][0].removesuffix(".__main__")
    for command in f"ringspan {name} --help", f"{module} --help":
        code, output = start_all()["answers"][command]
        assert code == 0 and output, f"{command}: {code}\n{output}"


def test_the_doctor_and_the_usage_start() -> None:
    for command in "ringspan doctor", "ringspan --help":
        code, output = start_all()["answers"][command]
        assert code == 0 and output, f"{command}: {code}\n{output}"


def test_programs_import_each_module_once() -> None:
    """Under a short name a module would exist twice, with two sets of classes and operators."""
    modules = start_all()["modules"]
    assert "ringspan.kernels.attention" in modules
    assert [name for name in modules if name.partition(".")[0] in SHORT_NAMES] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of("Makefile"), re.MULTILINE))
    used = {words[1] for words in LINES.values() if words[0] == "make" and "=" not in words[1]}
    assert used and used <= targets


def test_make_train_runs_the_laptop_experiment() -> None:
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/.run", "train", "ARGS=steps=5"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "ringspan launch experiment=laptop steps=5" in done.stdout, done.stdout + done.stderr
    assert compose.load(["experiment=laptop"], world_size=2).config.steps == 200


def test_make_refuses_an_option_that_it_would_drop() -> None:
    for extra, wrong in (["steps=5"], True), (["ARGS=steps=5 seed=1", f"PYTHON={sys.executable}"], False):
        done = subprocess.run(["make", "-n", "train", *extra], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert (done.returncode != 0) == wrong and ("make does not know steps" in done.stderr) == wrong, done.stderr


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def needs_ranks(snippet: str) -> bool:
    return snippet.startswith("# torchrun") or "init_process_group" in snippet


def run_snippets(command: list[str], folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if not all(map(needs_ranks, snippets(page)))])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    """All of a page in one process, each with names of its own."""
    files = []
    for number, snippet in enumerate(snippet for snippet in snippets(page) if not needs_ranks(snippet)):
        files.append(tmp_path / f"snippet_{number}.py")
        files[-1].write_text(snippet)
    run_snippets([sys.executable, "-c", "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]", *files], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page, nth", [(p, n) for p in GUIDES for n, text in enumerate(snippets(p)) if needs_ranks(text)])
def test_snippets_of_several_ranks_run(page: str, nth: int, tmp_path: Path) -> None:
    snippet = snippets(page)[nth]
    ranks = re.match(r"# torchrun --nproc-per-node=(\d)", snippet)
    path = tmp_path / "snippet.py"
    path.write_text(snippet)
    run_snippets([*TORCHRUN, f"--nproc-per-node={ranks[1] if ranks else 2}", str(path)], tmp_path)


def test_pages_have_snippets() -> None:
    assert all(snippets(page) for page in ("README.md", "docs/guides/attention.md", "docs/guides/ring.md"))


def prose(page: str) -> str:
    """A page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE))


def links(page: str) -> list[tuple[str, str]]:
    """Relative links as (path, anchor); the path of a link within the page is the page's own."""
    found = []
    for target in re.findall(r"\]\(<?([^)\s>]+)>?\)", prose(page)):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            place = (ROOT / page).parent / path if path else ROOT / page
            found.append((os.path.relpath(place, ROOT), anchor))
    return found


@cache
def anchors(page: str) -> list[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for title in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        repeats = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{repeats}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_exist(page: str) -> None:
    for path, anchor in links(page):
        assert (ROOT / path).exists(), f"{page} links to {path}"
        if anchor and path.endswith(".md"):
            assert anchor in anchors(path), f"{page} links to {path}#{anchor}"


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, left = set(), ["README.md"]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            left += [path for path, _ in links(page) if path in PAGES]
    assert reached == set(PAGES), sorted(set(PAGES) - reached)
