"""Shell completion, also in a real bash."""

import shutil
import subprocess
import sys

import pytest

from ringspan import ROOT
from ringspan.launch import completion


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("la", ["launch"]),
        ("bench k", ["kernels"]),
        ("completion ", ["bash", "zsh"]),
        ("launch experiment=gp", ["experiment=gpt2_124m"]),
        ("launch optim.muon", ["optim.muon_lr=", "optim.muon_momentum="]),
        ("launch steps=3 --ra", ["--ranks="]),
        ("launch steps=", []),
        ("doctor ", []),
    ],
)
def test_words(line: str, found: list[str]) -> None:
    assert completion.complete(line) == found


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("line", "reply"), [("ringspan launch experiment=lap", "laptop"), ("ringspan expe", "experiments")])
def test_the_script_completes_in_bash(line: str, reply: str) -> None:
    script = f'''
    ringspan() {{ {sys.executable} -m ringspan "$@"; }}
    compopt() {{ :; }}
    source <(ringspan completion bash)
    COMP_LINE="{line}" COMP_POINT={len(line)}; _ringspan; echo "${{COMPREPLY[@]}}"
    '''
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == reply, done.stderr


def test_another_shell_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["fish"]) == 2 and "it takes bash or zsh" in capsys.readouterr().err
