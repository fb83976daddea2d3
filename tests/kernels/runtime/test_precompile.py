"""Threads beside a first call: a backward is compiled once, beside its forward, and errors are those of the call itself."""

import contextvars
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ringspan import Mask, attention
from ringspan.kernels.runtime import precompile
from ringspan.kernels.runtime.precompile import compile_kernel


@pytest.fixture(autouse=True)
def nothing_precompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_precompiled", set())


class SlowKernel:
    """Stand-in for a kernel that takes a while to compile."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.cache, self.compilations = threading.Event(), threading.Event(), None, 0

    def warmup(self, grid: tuple[int]) -> str:
        if self.cache is None:
            self.begun.set()
            assert self.may_end.wait(30)
            self.compilations += 1
            self.cache = "compiled"
        return self.cache


def test_a_call_waits_for_the_thread_that_compiles_its_kernel() -> None:
    kernel, other, results = SlowKernel(), SlowKernel(), []
    other.may_end.set()
    threads = [threading.Thread(target=lambda: results.append(compile_kernel(kernel, (1,), {}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert kernel.begun.wait(30)
    assert compile_kernel(other, (1,), {}) == "compiled"  # another kernel does not wait
    kernel.may_end.set()
    for thread in threads:
        thread.join()
    assert results == ["compiled"] * 2 and kernel.compilations == 1


def test_only_the_threads_on_a_gpu_load_kernels() -> None:
    class Compiled:
        loaded = 0

        def _init_handles(self) -> None:
            self.loaded += 1

    class Kernel:
        def warmup(self, grid: tuple[int]) -> Compiled:
            return Compiled()

    def as_in_a_thread() -> Compiled:
        precompile._loads_kernels.set(True)
        return compile_kernel(Kernel(), (1,), {})

    assert contextvars.copy_context().run(as_in_a_thread).loaded == 1
    assert compile_kernel(Kernel(), (1,), {}).loaded == 0


def test_each_kind_of_call_is_compiled_once_and_errors_are_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", object())  # without a GPU there is none
    calls = []

    def run(q: torch.Tensor, seed: torch.Tensor | None, factors: list[float]) -> None:
        calls.append((q.device.type, q.stride(), seed, factors))
        raise RuntimeError("the thread must not print this")

    q = torch.zeros(2, 8, 4, 64).transpose(1, 2)
    threads = [precompile.precompile(run, x, None, factors) for factors in ([0.5], [0.25]) for x in (q, q.clone(), q[:1])]
    for thread in threads:
        if thread is not None:
            thread.join()
    assert [thread is None for thread in threads] == [False, True, True] * 2
    assert sorted(calls, key=str) == [("meta", q.stride(), None, [0.25]), ("meta", q.stride(), None, [0.5])]


BACKWARD_BESIDE_FORWARD = """
import json, sys, threading
import torch
from ringspan.kernels.runtime.warmup import compile_for
compile_for("sm_90")
from triton.runtime.jit import JITFunction
from ringspan.kernels import attention as module

compiled = []
original = JITFunction._do_compile
def record(self, *args, **options):
    compiled.append((self.fn.__name__, threading.current_thread() is threading.main_thread()))
    return original(self, *args, **options)
JITFunction._do_compile = record

q = torch.empty(1, 256, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=sys.argv[1] == "grad")
options = None, None, None, None, None, [-1, 0, 0, 0], [0.25, 0.0, 0.0], "triton"
out, lse = (x.detach() for x in module.without_dispatcher["attention_forward"](q, q, q, *options))
if sys.argv[2] == "waits":
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
module.without_dispatcher["attention_backward"](out, None, out, lse, q, q, q, *options)
print(json.dumps(sorted(compiled)))
"""


@pytest.mark.parametrize("gradients, then", [("grad", "waits"), ("grad", "goes on"), ("no grad", "goes on")])
def test_a_forward_with_gradients_compiles_its_backward_in_a_thread(gradients: str, then: str, tmp_path) -> None:
    """In a process without the interpreter: no kernel is compiled twice, also if the backward follows at once.

    If it waits, the main thread compiles only the forward; else it may be the first to reach a kernel of the backward.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BACKWARD_BESIDE_FORWARD, gradients, then]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    compiled = dict(json.loads(process.stdout))  # name: whether by the main thread
    assert len(compiled) == len(json.loads(process.stdout))
    assert compiled.keys() == {"attention_backward_dkdv", "attention_backward_dq", "attention_forward", "row_products"}
    by_main = {name for name, in_main in compiled.items() if in_main}
    if gradients == "no grad":
        assert by_main == compiled.keys()
    elif then == "waits":
        assert by_main == {"attention_forward"}


@pytest.mark.gpu
def test_a_first_backward_on_a_gpu_compiles_and_loads_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test has these options."""
    compiled: list[tuple[str, bool]] = []
    loaded: dict[str, bool] = {}  # whether the main thread loaded a kernel first
    compile_kernel, load_kernel = JITFunction._do_compile, CompiledKernel._init_handles

    def record_load(self: Any) -> None:
        loaded.setdefault(self.name, threading.current_thread() is threading.main_thread())
        load_kernel(self)

    def record(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append((self.fn.__name__, threading.current_thread() is threading.main_thread()))
        return compile_kernel(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", record)
    monkeypatch.setattr(CompiledKernel, "_init_handles", record_load)
    q, k, v = (torch.randn(1, 300, 2, 104, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, Mask(causal=True, window=64), softcap=3.0)
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(bool(x.isfinite().all()) for x in gradients)
    assert {is_main for name, is_main in compiled if "forward" in name} == {True}
    assert {is_main for name, is_main in compiled if "backward" in name} == {False}
    assert {is_main for name, is_main in loaded.items() if "backward" in name} == {False}
