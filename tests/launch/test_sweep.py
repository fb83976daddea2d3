"""The table of a sweep's results."""

import json
from pathlib import Path

from ringspan.launch import sweep


def test_killed_and_unstarted_runs_have_a_line(tmp_path: Path) -> None:
    for name, losses, end in (("good", (3.0, 2.0), ""), ("killed", (1.5,), '{"kind": "tra')):
        (tmp_path / name).mkdir()
        lines = [json.dumps(dict(kind="train", step=i, loss=x, tokens_per_s=2000.0)) for i, x in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n" + end)
    table = sweep.table([(f"name={name}", tmp_path / name, 0) for name in ("unstarted", "good", "killed")]).splitlines()
    assert "last 10 steps" in table[-1]
    assert [line.split()[:5] for line in table[1:-1]] == [
        ["–", "1.500", "2.0k", "1", "name=killed"],
        ["–", "2.500", "2.0k", "2", "name=good"],
        ["–", "–", "–", "0", "name=unstarted"],
    ]
