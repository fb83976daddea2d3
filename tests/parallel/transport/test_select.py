"""Choice of the transport, and of the number of blocks per step."""

from types import SimpleNamespace

import pytest
import torch

from ringspan import Layout
from ringspan.parallel.transport.select import (
    AUTO_TRANSPORTS,
    COPY_TRANSPORTS,
    PART_BYTES,
    SHORT_SHARD,
    TRANSPORTS,
    blocks_per_step,
    choose_transport,
)
from tests.parallel.helpers.plan_cases import halving, single_step


def test_steps_of_copy_halve() -> None:
    ranks = (2, 3, 4, 6, 8)
    assert [halving(n) for n in ranks] == [(1,), (1, 1), (2, 1), (2, 2, 1), (4, 2, 1)]
    assert [single_step(n) for n in ranks] == [(1,), (2,), (3,), (5,), (7,)]
    for kind, transport, causal in (("striped", "copy", True), ("zigzag", "copy", False), ("zigzag", "p2p", True)):
        assert blocks_per_step(transport, Layout(kind, 8, 8), causal, 1, 8) == (1,) * 7


@pytest.mark.parametrize(
    "nbytes, heads, rows, blocks",
    [
        (PART_BYTES // 2, 8, 2 * SHORT_SHARD, (2, 2, 2, 1)),
        (PART_BYTES, 8, 2 * SHORT_SHARD, (1,) * 7),  # two blocks would need four parts
        (PART_BYTES * 2, 8, 2 * SHORT_SHARD, (2, 2, 2, 1)),  # one block needs four parts, and so do two
        (PART_BYTES * 2, 2, 2 * SHORT_SHARD, (1,) * 7),  # one block goes in two parts, which a second one would enlarge
        (PART_BYTES * 2, 8, SHORT_SHARD, (1,) * 7),  # one block goes in one part
        (PART_BYTES * 4, 8, SHORT_SHARD, (1,) * 7),
        (PART_BYTES // 4, 1, SHORT_SHARD, (4, 2, 1)),
    ],
)
def test_a_step_has_no_more_parts_than_a_block(nbytes: int, heads: int, rows: int, blocks: tuple[int, ...]) -> None:
    assert blocks_per_step("copy", Layout("zigzag", 8 * rows, 8), True, nbytes, heads) == blocks


def test_auto_follows_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(one_host=True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for nbytes in (0, 2**20, 2**33):
        assert choose_transport("auto", groups, cpu, nbytes) == "p2p"
        for backward in (False, True):
            assert choose_transport("auto", groups, cuda, nbytes, backward) == "copy"
            assert choose_transport("auto", SimpleNamespace(one_host=False), cuda, nbytes, backward) not in COPY_TRANSPORTS
    for name in COPY_TRANSPORTS:
        assert choose_transport(name, groups, cuda, 0) == name  # named explicitly
        with pytest.raises(ValueError, match=f"{name}' needs CUDA"):
            choose_transport(name, groups, cpu, 0)
        with pytest.raises(ValueError, match="one host"):
            choose_transport(name, SimpleNamespace(one_host=False), cuda, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_transport("auto", groups, cuda, 2**20) == "p2p"
    for name in COPY_TRANSPORTS:
        with pytest.raises(ValueError, match=f"{name}' needs CUDA"):
            choose_transport(name, groups, cuda, 0)
    for table in AUTO_TRANSPORTS.values():
        limits = [limit for limit, *_ in table]
        assert all(set(choices) <= set(TRANSPORTS[1:]) and len(choices) == 2 for _, *choices in table)
        assert limits[-1] is None and None not in limits[:-1] and limits[:-1] == sorted(limits[:-1])


def test_auto_uses_no_copy_engines_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_transport("auto", SimpleNamespace(one_host=True), torch.device("cuda"), 2**20) == "p2p"


def test_auto_logs_each_choice_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And not in each layer of each step."""
    monkeypatch.setenv("RINGSPAN_LOG", "1")
    for nbytes in (3 * 2**20, 3 * 2**20, 7 * 2**20):
        for backward in (False, True):
            choose_transport("auto", SimpleNamespace(one_host=True), torch.device("cpu"), nbytes, backward)
    assert capsys.readouterr().err.splitlines() == [
        f"ringspan: the ring's {direction} moves {size}.0 MiB a rank by p2p (cpu)"
        for size in (3, 7)
        for direction in ("forward", "backward")
    ]
