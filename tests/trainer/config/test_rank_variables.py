"""Variables of another launcher are one message before torch starts; those of one rank or of a whole job are accepted."""

import os

import pytest

from ringspan.launch import __main__ as launch
from ringspan.trainer import train
from ringspan.trainer.config import compose, rank_variables

JOB = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*rank_variables.NUMBERS, *rank_variables.OTHERS):
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (dict(RANK="1"), "RANK=1, WORLD_SIZE unset, which stands for 1: a rank is below the number of ranks"),
        (dict(RANK="5", WORLD_SIZE="2"), "RANK=5, WORLD_SIZE=2: a rank is below the number of ranks"),
        (dict(RANK=""), "RANK='': not a number"),
        (dict(RANK="x", WORLD_SIZE="-2"), "RANK='x', WORLD_SIZE='-2': not a number"),
        (dict(WORLD_SIZE="x"), "WORLD_SIZE='x': not a number"),
        (dict(WORLD_SIZE="2"), "WORLD_SIZE=2: the ranks cannot find each other without RANK and MASTER_PORT"),
        (dict(RANK="1", WORLD_SIZE="2"), "WORLD_SIZE=2: the ranks cannot find each other without MASTER_PORT"),
    ],
)
def test_variables_of_another_launcher_are_one_message(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit) as stop:
        train.main(["experiment=laptop", "runs=/nowhere", "parallel.device=cpu", "parallel.timeout=1"])
    assert stop.value.code == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"ringspan train: {message}; {rank_variables.REMEDY}" and len(rest) == 1
    with pytest.raises(SystemExit):  # a message of its own is printed as well
        compose.fail("ringspan check", ValueError("a mistake"))
    assert "ringspan check: a mistake" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # which starts ranks itself
        launch.main(["--ranks=2", "optim.lrr=1"])
    assert "there is no option optim.lrr" in capsys.readouterr().err and "RANK" not in os.environ


@pytest.mark.parametrize("variables", [{}, dict(RANK="0"), dict(WORLD_SIZE="1"), dict(RANK="0", MASTER_PORT="29500"), JOB])
def test_variables_of_one_rank_or_of_a_job_are_accepted(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert rank_variables.problem(joins=True) == "" and rank_variables.is_first() == (variables is not JOB)
