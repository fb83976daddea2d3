"""The doctor: findings about packages, the installation and links, with the remedy of each problem."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringspan import ROOT
from ringspan.launch import doctor, listeners

BASE = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.0.1"}  # what `pip install ringspan` installs
TRAIN = {"deepspeed": "0.19.1", "hydra-core": "1.3.2", "wandb": "0.20"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that the doctor finds, with their versions."""
    packages = dict(BASE)
    monkeypatch.setattr(doctor, "_version", packages.get)
    return packages


def test_a_base_environment_has_no_problems(installed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("deepspeed", "hydra-core", "wandb"):
        assert f'  note  {name} is not installed: training needs it; pip install "ringspan[train]"' in lines
    assert lines[-1] == 'no problems; for training, pip install "ringspan[train]"'


def test_a_training_environment_names_the_next_command(installed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    installed.update(TRAIN)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problems; start with: ringspan launch experiment=laptop"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dict(torch=None), '  BAD   torch is not installed: pip install "torch>=2.11"'),
        (dict(torch="2.9.1"), '  BAD   torch 2.9.1: too old; pip install "torch>=2.11"'),
        (dict(triton=None), '  BAD   triton is not installed: pip install "triton>=3.6"'),
        (dict(triton="3.5.1"), '  BAD   triton 3.5.1: too old; pip install "triton>=3.6"'),
        (dict(deepspeed="0.18.9"), '  BAD   deepspeed 0.18.9: too old; pip install "deepspeed>=0.19"'),
    ],
    ids=str,
)
def test_missing_and_old_packages_are_problems(
    change: dict[str, str], problem: str, installed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.update(change)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert problem in lines and lines[-1] == "1 problem"


def test_the_doctor_imports_no_package_of_extras(tmp_path: Path) -> None:
    """In its own process, where importing one of them fails."""
    code = """if True:
        import importlib.metadata, sys
        from ringspan.__main__ import TRAIN_EXTRA, main
        sys.modules.update(dict.fromkeys((*TRAIN_EXTRA, "tensorboard", "tokenizers", "tiktoken")))
        version = importlib.metadata.version
        def base_version(name):
            if name not in ("torch", "triton", "numpy"):
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)
        importlib.metadata.version = base_version
        raise SystemExit(main(["doctor"]))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and 'pip install "ringspan[train]"' in done.stdout, done.stdout + done.stderr


def test_unknown_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--link"]) == 2
    assert "ringspan doctor: --link" in capsys.readouterr().err
    assert doctor.main(["--help"]) == 0
    assert "ringspan doctor" in capsys.readouterr().out


def check_installation(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], int]:
    checkup = doctor.Doctor()
    doctor.installation(checkup)
    return capsys.readouterr().out.splitlines(), checkup.problems


def test_this_installation_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    lines, problems = check_installation(capsys)
    assert problems == 0 and len(lines) == 1 and str(ROOT) in lines[0]


def test_another_ringspan_in_the_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example a checkout, while `ringspan` is the command of an installed wheel."""
    (tmp_path / "ringspan").mkdir()
    (tmp_path / "ringspan/__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    lines, problems = check_installation(capsys)
    assert problems == 1 and f"finds {tmp_path}/ringspan/__init__.py in this folder" in lines[0] and "uninstall" in lines[0]


def test_a_ringspan_that_ranks_cannot_import_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="ModuleNotFoundError")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    lines, problems = check_installation(capsys)
    assert problems == 1 and "`import ringspan` fails" in lines[0] and f"change to {ROOT}" in lines[0]


def test_ports_that_other_hosts_reach_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        listeners.Listener("127.0.0.1", 4001, 71, "python -m ringspan.trainer.train"),
        listeners.Listener("0.0.0.0", 29500, 70, "python -m torch.distributed.run"),
        listeners.Listener("0.0.0.0", 22, 1, "sshd"),
    ]
    monkeypatch.setattr(listeners, "listeners", lambda: found)
    doctor.network(doctor.Doctor())
    local, open_port, summary = capsys.readouterr().out.splitlines()
    assert local.startswith("  ok    127.0.0.1:4001 of process 71 (python -m ringspan.trainer.train)")
    assert open_port.startswith("  note  0.0.0.0:29500 of process 70") and "takes connections of other hosts" in open_port
    assert "torchrun's store on every interface" in summary


def test_packages_named_like_our_folders_are_no_finding(
    tmp_path: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hugging Face's `kernels` is another package than ringspan.kernels."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert importlib.util.find_spec("kernels") is not None
    assert doctor.main([]) == 0
    assert str(tmp_path) not in capsys.readouterr().out


def check_links(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: Any) -> tuple[list[str], int]:
    def run(*args: Any, **options: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(doctor, "_num_gpus", lambda: 4)
    monkeypatch.setattr(subprocess, "run", run)
    checkup = doctor.Doctor()
    doctor.links(checkup)
    return capsys.readouterr().out.splitlines(), checkup.problems


def measured(*results: dict[str, Any]) -> SimpleNamespace:
    text = "NCCL version 2.28\n" + "".join(json.dumps(result) + "\n" for result in results)
    return SimpleNamespace(returncode=0, stdout=text, stderr="")


def test_fast_links_report_the_shard_length_that_hides_transfers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: n · n tokens need 5 n² · D FLOPs per head and move 12 n · D bytes: n = 4000 at 6e14 FLOP/s and 3.6e11 B/s."""
    results = dict(method="messages", mib=256, speed=3e11), dict(method="copy engines", mib=256, speed=3.6e11)
    lines, problems = check_links(monkeypatch, capsys, measured(*results))
    assert problems == 0 and lines == [
        "  ok    messages: 300 GB/s of 256 MiB, all 4 GPUs concurrently",
        "  ok    copy engines: 360 GB/s of 256 MiB, all 4 GPUs concurrently",
        "  ok    attention overlaps all transfers from about 4k tokens per GPU, with GQA 4:1 from a quarter of that",
    ]


def test_slow_links_and_missing_copy_engines_name_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = dict(method="messages", mib=256, speed=2e10), dict(method="copy engines", error="no peer access")
    lines, problems = check_links(monkeypatch, capsys, measured(*results))
    assert problems == 0 and "  note  no copy engines (no peer access): the ring's transport p2p needs none" in lines
    assert "from about 70k tokens per GPU" in lines[2] and "nvidia-smi topo -m" in lines[3]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (SimpleNamespace(returncode=1, stdout="", stderr="a\nncclSystemError"), "(ncclSystemError)"),
        (SimpleNamespace(returncode=1, stdout="", stderr=""), "(no answer)"),
        (subprocess.TimeoutExpired("torchrun", 300), "(no answer in 300 seconds)"),
    ],
)
def test_unreachable_gpus_are_a_problem(
    result: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, problems = check_links(monkeypatch, capsys, result)
    assert problems == 1 and reason in lines[0] and "NCCL_DEBUG=INFO" in lines[0] and len(lines) == 1
