"""The tool that switches off each mechanism of the ring: the mechanism is off while it is measured, and on afterwards."""

import json
from pathlib import Path

import pytest
import torch

from ringspan.parallel import gradient_return, ring_overlapped
from ringspan.parallel.bench import rehearse
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.layout import Layout
from ringspan.parallel.transport import select
from tests.parallel.bench import mechanisms


def test_every_mechanism_is_measured_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_overlapped, "SPLIT_HEADS_ABOVE", 0)
    monkeypatch.setattr(gradient_return, "SMALL_BYTES", 0)
    modules = gradient_return, ring_overlapped, select, rehearse
    path, saved = tmp_path / "mechanisms.json", [dict(vars(module)) for module in modules]
    options = f"--tokens 48 --heads 4/2 --head-dim 16 --dtype fp32 --rounds 1 --rep 1 --rank 0 --json {path}".split()
    assert mechanisms.main(options) == 0
    assert mechanisms.main([*options, "--window", "4"]) == 0  # a second shape joins the first
    assert [dict(vars(module)) for module in modules] == saved
    plain, window = json.loads(path.read_text())["shapes"].values()
    names = list(plain["rows"])
    assert names[0] == "" and names[-1] == "alone" and len(names) == 14 and "--json" not in plain["command"]
    assert not any("halves, instead" in name for name in window["rows"])
    base, one_ring = plain["rows"][""], plain["rows"]["overlapped backward, instead of the plain ring's"]
    assert base["both_mcycles"] == base["forward_mcycles"] + base["backward_mcycles"]
    assert one_ring["forward_mcycles"] == base["forward_mcycles"] and one_ring["forward_mcycles_gain"] == 1
    assert one_ring["backward_mcycles_gain"] == one_ring["backward_mcycles"] / base["backward_mcycles"]
    assert "stream of casts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mechanisms.main([*options, "--ranks", "3"])
    assert "differs in ranks: name another file" in capsys.readouterr().err


def test_a_whole_local_block_is_compared_with_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_return, "num_sms", lambda device: 132)
    setting = Setting(48, 4, 2, 16)
    shard = rehearse.tensors(setting, 48, torch.device("cpu"), torch.float32)
    problem = mechanisms.make_problem(shard, Layout("zigzag", 192, 4), setting, 0, link=0)
    table, last_halves = mechanisms.variants(problem), []
    assert not any(name.startswith("local block in halves") for name in table)
    start = gradient_return.GradientReturn.last_buffer
    monkeypatch.setattr(
        gradient_return.GradientReturn, "last_buffer", lambda self: (last_halves.append(self.last_half), start(self))[1]
    )
    for variant in (mechanisms.Variant("both"), table["local block whole and first, instead of in halves"]):
        mechanisms.make_calls(variant, problem)["backward"]()
    assert last_halves == [(slice(0, 2), slice(48, 48)), (slice(1, 2), slice(0, 48))]


def test_sums_of_several_arrivals_and_terms_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_return, "SMALL_BYTES", 0)
    counts: list[int] = []
    add = gradient_return.sum_gradients
    monkeypatch.setattr(gradient_return, "sum_gradients", lambda terms, *args: (counts.append(len(terms)), add(terms, *args)))
    setting = Setting(48, 4, 2, 16)
    shard = rehearse.tensors(setting, 48, torch.device("cpu"), torch.float32)
    problem = mechanisms.make_problem(shard, Layout("zigzag", 192, 4), setting, 3, link=0)
    for name, most in (("", 4), ("sums of more than two terms", 2), ("sums of several arrivals", 3)):
        counts.clear()
        variant = mechanisms.variants(problem)[name] if name else mechanisms.Variant("backward")
        mechanisms.make_calls(variant, problem)["backward"]()
        assert max(counts) == most
