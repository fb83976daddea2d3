"""The list of experiments."""

import pytest

from ringspan.trainer.config import experiments
from ringspan.trainer.config.help import CONF, group_choices


def test_every_experiment_has_a_line_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main([]) == 0
    out = capsys.readouterr().out
    rows = experiments.experiments()
    assert {row.name for row in rows} == set(group_choices("experiment", [CONF])) and rows[0].name == "laptop"
    assert all(row.about and row.gpus != "–" and row.name in out for row in rows)
    assert {row.weights for row in rows if row.model == "gpt-21m"} == {"21.4M"}  # without a tokenizer's file
    assert "ringspan launch experiment=laptop" in out
    assert experiments.main(["laptop"]) == 2 and "takes no argument" in capsys.readouterr().err
