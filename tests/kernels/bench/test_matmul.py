"""The matmul benchmark: every direction and head, bad options, and its time on a GPU."""

import json
import time
from pathlib import Path

import pytest

from ringspan.kernels.bench import matmul


def test_the_benchmark_measures_every_direction_and_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "matmul-cpu.json"
    assert matmul.main(["--device=cpu", "--repeats=1", f"--json={path}"]) == 0
    result = json.loads(path.read_text())
    assert [(head["inputs"], head["outputs"]) for head in result["heads"]] == [(64, 256), (64, 257)]
    assert [(row["inputs"], row["outputs"]) for row in result["rows"]] == [(64, 128), (128, 64)]
    assert all(row[name] > 0 for row in result["rows"] for name in matmul.DIRECTIONS)
    assert all(head["s_per_token"] > 0 for head in result["heads"])
    assert result["elementwise_bytes_per_s"] > 0 and result["optimizer_s_per_weight"] > 0 and result["kind"] == "matmul"
    assert "TB/s" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--repeats=0", "--json=no/such/folder/x.json"])
def test_bad_options_are_one_message(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matmul.main(["--device=cpu", option])
    assert option.partition("=")[0] in capsys.readouterr().err


@pytest.mark.gpu
def test_the_benchmark_takes_less_than_a_minute_on_a_gpu(tmp_path: Path) -> None:
    began = time.perf_counter()
    assert matmul.main([f"--json={tmp_path / 'matmul-gpu.json'}"]) == 0
    assert time.perf_counter() - began < 60
    result = json.loads((tmp_path / "matmul-gpu.json").read_text())
    assert all(10 < row[name] < 3000 for row in result["rows"] for name in matmul.DIRECTIONS)
    odd, aligned = (head["s_per_token"] for head in result["heads"][:2])
    assert aligned < 1.1 * odd
