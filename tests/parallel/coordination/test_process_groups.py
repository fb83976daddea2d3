"""Process groups: which ranks share a host."""

import pytest
import torch

from ringspan.parallel.coordination import process_groups


@pytest.mark.parametrize("num_gpus, can_access, is_shared", [(2, True, True), (2, False, False), (1, True, False)])
def test_gpus_without_peer_access_share_no_host(
    num_gpus: int, can_access: bool, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a rank that sees one GPU only: it cannot know about others, and two such GPUs may both be number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: can_access)
    hosts = []
    for rank in range(2):
        monkeypatch.setattr("os.getpid", lambda rank=rank: 100 + rank)
        hosts.append(process_groups._host_id(torch.device("cuda", rank % num_gpus)))
    assert (hosts[0] == hosts[1]) is is_shared
    assert process_groups._host_id(torch.device("cpu")) == process_groups._host_id(torch.device("cpu"))
