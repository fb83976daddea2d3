"""`ringspan warmup`: what it compiles, that it fills Triton's cache, and its errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringspan.kernels.runtime import warmup as kernels
from ringspan.kernels.runtime.warmup import AttentionCall, Job, JobResult
from ringspan.launch import warmup


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """The calls that the command compiles, instead of compiling them. The first kernel of each job is new."""
    calls: list[AttentionCall] = []

    def compile_all(wanted: list[AttentionCall], target: str, processes: int) -> Iterator[JobResult]:
        assert target == "sm_90"
        calls.extend(wanted)
        for call in wanted:
            for direction in ("forward", "backward"):
                error = "RuntimeError: no registers" if call.head_dim == 248 else ""
                yield JobResult(Job(call, direction), {} if error else {"a": False, "b": True}, 1.5, error)

    monkeypatch.setattr(warmup, "compile_all", compile_all)
    return calls


def test_shapes_and_flags_select_calls(compiled: list[AttentionCall], capsys: pytest.CaptureFixture) -> None:
    assert warmup.main(["32/8x128", "16x192/128", "--target", "sm_90", "--documents", "--dtype", "fp16"]) == 0
    assert compiled == [
        AttentionCall(32, 8, 128, 128, "fp16", documents=True),
        AttentionCall(16, 16, 192, 128, "fp16", documents=True),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  [1/4] 32/8x128 fp16 causal documents forward: compiled a (1.5 s)"
    assert lines[-1] == "4 kernels compiled, 4 were in the cache"


def test_options_of_a_run_select_calls(compiled: list[AttentionCall]) -> None:
    model = ["model.dim=256", "model.heads=8", "model.kv_heads=2", "model.windows=[64,0]", "model.softcap=30.0"]
    assert warmup.main([*model, "debug.deterministic=true", "--target", "sm_90"]) == 0
    assert {(call.window, call.documents) for call in compiled} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {(call.heads, call.kv_heads, call.head_dim, call.softcap, call.deterministic) for call in compiled} == {
        (8, 2, 32, True, True)
    }


def test_a_kernel_that_does_not_compile_fails_the_command(compiled: list, capsys: pytest.CaptureFixture) -> None:
    assert warmup.main(["4x248", "4x64", "--target", "sm_90"]) == 1
    out = capsys.readouterr().out
    assert "[1/4] 4/4x248 bf16 causal forward: RuntimeError: no registers" in out
    assert "2 kernels compiled, 2 were in the cache, 2 jobs failed" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["128"], "write a shape as HEADS[/KV_HEADS]xHEAD_DIM[/V_HEAD_DIM]"),
        (["8/3x64"], "multiple of the KV heads"),
        (["8x100"], "16 to 256 in steps of 8"),
        (["8x64", "model.heads=8"], "not both"),
        (["parallel.ring=2"], "use parallel.data=1 parallel.ring=1"),
        (["model.haeds=8"], "haeds"),
        (["8x64", "--processes", "0"], "at least 1"),
    ],
)
def test_bad_options_name_a_remedy(argv: list[str], message: str, compiled: list, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        warmup.main([*argv, "--target", "sm_90"])
    assert message in capsys.readouterr().err and compiled == []


def test_without_a_gpu_a_target_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(warmup, "current_target", lambda: None)
    with pytest.raises(SystemExit):
        warmup.main(["8x64"])
    assert "name the one that will run, --target sm_80 or sm_90" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_warmup_finds_all_kernels_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JobResult for a chip that this machine does not have, in processes without the interpreter of tests."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls = [AttentionCall(2, 1, 16, 16, backend="triton")]
    first, second = (list(kernels.compile_all(calls, "sm_90", 2)) for _ in range(2))
    assert [result.error for result in (*first, *second)] == [""] * 4
    for results, is_cached in ((first, False), (second, True)):
        found = {name: cached for result in results for name, cached in result.kernels.items()}
        names = ("attention_forward", "attention_backward_dq", "attention_backward_dkdv", "row_products")
        assert found == dict.fromkeys(names, is_cached)
    assert list(tmp_path.rglob("*.cubin"))
    failed = list(kernels.compile_all([AttentionCall(1, 1, 16, 16, backend="none")], "sm_90", 1))
    assert all("ValueError: backend='none'" in result.error for result in failed) and len(failed) == 2
