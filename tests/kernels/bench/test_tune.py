"""The tuner's candidates, as far as that goes without a GPU."""

import pytest

from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.bench import tune


@pytest.mark.parametrize("kernel", tune.HOPPER)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_candidate_is_launched_and_the_table_stays(kernel: str, width: int) -> None:
    tables = repr((hopper_tiles.FORWARD, hopper_tiles.BACKWARD))
    for tile in tune.HOPPER_CANDIDATES[kernel].get(width, []):
        launch = tune.launch(kernel, width, tile, tune.tensors(width, "meta"))
        names = {parameter.name for parameter in launch.kernel.params} | {"num_warps", "maxnreg"}
        _, arguments = launch.worked_out()
        assert set(arguments) <= names
        kept = {name: value for name, value in tile.items() if name != "STAGED"}  # only where out is short enough
        assert kept.items() <= arguments.items()
    assert repr((hopper_tiles.FORWARD, hopper_tiles.BACKWARD)) == tables


def test_what_is_used_is_among_the_candidates() -> None:
    for kernel, table in (("hopper-forward", hopper_tiles.FORWARD), ("hopper-backward", hopper_tiles.BACKWARD)):
        for width, candidates in tune.HOPPER_CANDIDATES[kernel].items():
            assert any(table[width] | tile == table[width] for tile in candidates), (kernel, width)


def test_hopper_needs_a_gpu(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", "--kernels", "hopper-backward"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "measured on a GPU" in capsys.readouterr().err
