"""The choice of a backend, by name and by device and inputs."""

import subprocess
import sys

import pytest
import torch

from ringspan import attention
from ringspan.kernels.backends import choose
from ringspan.kernels.backends.choose import adds_dq_atomically, choose_backend
from ringspan.kernels.runtime import triton_compat


def test_auto_chooses_by_device_and_inputs(device: str) -> None:
    q = torch.randn(2, 24, 4, 16, device=device)
    v = torch.randn(2, 24, 2, 16, device=device)
    assert choose_backend("auto", q, v) == ("triton" if device == "cuda" else "chunked")
    assert choose_backend("auto", q.double(), v.double()) == "chunked"
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    low = q.bfloat16(), v.bfloat16()
    assert choose_backend("auto", *low) == ("hopper" if hopper else "triton" if device == "cuda" else "chunked")
    assert choose_backend("auto", *low, dropout=0.1) == ("triton" if device == "cuda" else "chunked")
    with pytest.raises(ValueError, match="needs an sm_90 GPU" if not hopper else "dropout"):
        choose_backend("hopper", *low, dropout=0.1)


def test_meta_tensors_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give shapes; the kernels' backends, by name, need a chip to compile for."""
    monkeypatch.setattr(triton_compat, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RINGSPAN_CHIP", raising=False)
    q, k = (torch.empty(2, 24, heads, 16, device="meta", requires_grad=True) for heads in (4, 2))
    for backend in ("auto", "chunked", "reference"):
        out, lse = attention(q, k, k, backend=backend, return_lse=True)
        assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 24)
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]
    with pytest.raises(ValueError, match=r"^backend='triton' does not run on meta .RINGSPAN_CHIP=.*: use backend='chunked'"):
        attention(q, k, k, backend="triton")
    with pytest.raises(ValueError, match=r"^backend='hopper' needs an sm_90 GPU"):
        attention(q, k, k, backend="hopper")


def test_triton_rejects_fp64(device: str) -> None:
    q = torch.zeros(2, 24, 4, 16, device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"backend='triton' has no fp64: use backend='chunked'"):
        attention(q, q, q, backend="triton")


def test_a_head_dim_that_a_backend_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """By name it is an error that says which head dims work; `auto` takes the next backend and logs the reason."""
    monkeypatch.setattr(triton_compat, "chip", lambda _: "sm_90")
    monkeypatch.setenv("RINGSPAN_LOG", "1")
    q, wide = (torch.empty(1, 16, 2, n, dtype=torch.bfloat16, device="meta") for n in (96, 264))
    for width in range(16, 257, 8):
        x = torch.empty(1, 16, 2, width, dtype=torch.bfloat16, device="meta")
        assert {choose_backend("auto", *pair) for pair in ((x, x), (x, q), (q, x))} == {"hopper"}
    for inputs in ((wide, wide), (wide, q), (q, wide)):
        for name in ("hopper", "triton"):
            with pytest.raises(ValueError, match=f"backend='{name}' takes head dims up to 256, not 264: use backend='chunked'"):
                choose_backend(name, *inputs)
        assert choose_backend("auto", *inputs) == "chunked"
    assert "attention runs on chunked: triton takes head dims up to 256, not 264" in capsys.readouterr().err


def test_a_gpu_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its kernels would not be launched, so it is an error by name, and `auto` takes the next backend."""
    monkeypatch.setattr(choose, "shared_memory", lambda device: 64 * 1024)
    monkeypatch.setenv("RINGSPAN_LOG", "1")
    q = torch.empty(1, 16, 2, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="'triton' needs 80 KB of shared memory, this GPU has 64 KB: use backend='chunked'"):
        choose_backend("triton", q, q)
    assert choose_backend("auto", q, q) == "chunked"
    assert "chunked: triton needs 80 KB of shared memory" in capsys.readouterr().err


def test_the_choice_is_logged_once() -> None:
    code = """
import torch; from ringspan import attention
q = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
attention(q, q, q), attention(q, q, q)
"""
    environment = {"RINGSPAN_LOG": "1", "PATH": "", "PYTHONPATH": "."}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.stderr.count("attention runs on chunked: triton has no fp64") == 1, process.stderr


def test_only_hopper_adds_to_dq_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a deterministic backward nor if the call uses the portable kernel."""
    q = torch.empty(1, 16, 2, 64, dtype=torch.bfloat16, device="meta")
    for chip, hopper in (("sm_90", True), ("sm_100", False)):
        monkeypatch.setattr(triton_compat, "chip", lambda _, chip=chip: chip)
        assert adds_dq_atomically(q, q) is hopper
        assert not adds_dq_atomically(q, q, deterministic=True)
        assert not adds_dq_atomically(q, q, dropout=0.1, seed=1)
        assert not adds_dq_atomically(q, q, backend="triton")
        assert not adds_dq_atomically(q.float(), q.float())
    assert not adds_dq_atomically(torch.empty(1, 16, 2, 64), torch.empty(1, 16, 2, 64))
