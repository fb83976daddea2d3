"""The tuner's candidates and options, without a GPU."""

import json
from pathlib import Path

import pytest

from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.bench import tune


@pytest.mark.parametrize("kernel", tune.HOPPER)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_candidate_replaces_the_table_only_for_its_launch(kernel: str, width: int) -> None:
    tables = repr((hopper_tiles.FORWARD, hopper_tiles.BACKWARD))
    for tile in tune.HOPPER_CANDIDATES[kernel].get(width, []):
        launch = tune.make_launch(kernel, width, tile, tune.make_tensors(width, "meta"))
        names = {parameter.name for parameter in launch.kernel.params} | {"num_warps", "maxnreg"}
        _, arguments = launch.make_arguments()
        assert set(arguments) <= names
        options = {name: value for name, value in tile.items() if name != "STAGED"}  # it also depends on out's dtype
        assert options.items() <= arguments.items()
    assert repr((hopper_tiles.FORWARD, hopper_tiles.BACKWARD)) == tables


def test_the_tables_are_among_the_candidates() -> None:
    for kernel, table in (("hopper-forward", hopper_tiles.FORWARD), ("hopper-backward", hopper_tiles.BACKWARD)):
        for width, candidates in tune.HOPPER_CANDIDATES[kernel].items():
            assert any(table[width, width] | tile == table[width, width] for tile in candidates), (kernel, width)


def test_tuning_needs_a_gpu(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main(["--kernels", "hopper-backward"])
    assert "measured on a GPU" in capsys.readouterr().err


def test_rows_are_written_after_each_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(tune, "chip", lambda device: "sm_80")
    monkeypatch.setattr(tune, "machine", lambda device: {"device": "a GPU"})

    def measure(kernels: list[str], width: int, chip_name: str) -> list[dict]:
        if width == 128:
            assert [row["width"] for row in json.loads(path.read_text())["rows"]] == [64]
        return [dict(kernel=kernel, width=width) for kernel in kernels]

    monkeypatch.setattr(tune, "tune", measure)
    assert tune.main(["--kernels", "dq", "--widths", "64", "128", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [row["width"] for row in result["rows"]] == [64, 128]
    assert result["command"] == "ringspan bench tune --kernels dq --widths 64 128"


def test_a_missing_folder_is_an_error_before_measuring(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(tune, "chip", lambda device: "sm_80")
    monkeypatch.setattr(tune, "machine", lambda device: {"device": "a GPU"})
    with pytest.raises(SystemExit):
        tune.main(["--json", "no/such/folder/x.json"])
    assert "make it first" in capsys.readouterr().err
