"""Run by test_torch_triton.py in a pytest of its own: Triton and TensorFlow in one process abort it.

What a GPU would run, which need not be there; and which kernels serve one.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from hvd_onebit.torch import codec as torch_codec
from hvd_onebit.torch import triton_kernels as kernels
from hvd_onebit.torch.codec import DeviceCodec, TritonCodec, codec_for

CUDA = torch.device("cuda")


# Compiled. What a kernel is compiled for: types of its arguments, and which are given.

GRADIENT = {"bits": None, "scales": None, "NUM": 0}
MESSAGES = {"gradient": None, "momentum": None, "NUM": 3}
LEAST = {"momentum": None, "error": None, "live": None}
SUMS = {"SUB": kernels.SUB_BLOCK, "HALVINGS": kernels.LANES.bit_length() - 1, "GROUPS": kernels._GROUPS}
COMPRESS = SUMS | {"BYTES": kernels._BYTES}
WHOLE = {"BLOCK": 0}
BY_2048 = {"BLOCK": 2048}

KERNELS = [
    pytest.param(kernels._compress_blocks, COMPRESS | GRADIENT | BY_2048 | {"MEAN": False}, id="compress"),
    pytest.param(kernels._compress_blocks, COMPRESS | GRADIENT | WHOLE | LEAST | {"MEAN": True}, id="compress-least"),
    pytest.param(kernels._compress_blocks, COMPRESS | MESSAGES | BY_2048 | {"MEAN": False}, id="reduce"),
    pytest.param(kernels._sums_of_sub_blocks, SUMS | GRADIENT | WHOLE | {"MEAN": True}, id="sums"),
    pytest.param(kernels._sums_of_sub_blocks, SUMS | MESSAGES | BY_2048 | {"MEAN": False}, id="sums-reduce"),
    pytest.param(kernels._scales_of_blocks, {"MEAN": False, "TILE": 128}, id="scales"),
    pytest.param(kernels._bits_and_errors, GRADIENT | {"BLOCK": 100, "BYTES": kernels._BYTES}, id="bits"),
    pytest.param(kernels._bits_and_errors, MESSAGES | WHOLE | {"BYTES": kernels._BYTES}, id="bits-reduce"),
    pytest.param(kernels._average, BY_2048 | {"NUM": 4, "TILE": 1024}, id="average"),
    pytest.param(kernels._apply, BY_2048 | {"NUM": 1, "TILE": 1024, "HOLD": True}, id="adam"),
    pytest.param(kernels._apply, WHOLE | {"NUM": 2, "TILE": 1024, "HOLD": False, "variance": None}, id="momentum"),
]
TYPES = dict.fromkeys(("beta", "one_minus_beta", "step_size", "eps", "correction", "decay"), "fp32")
TYPES |= dict.fromkeys(("stride", "n", "start"), "i64")
TYPES |= dict.fromkeys(("num_scales", "num_subs", "num_groups", "rows"), "i32")
TYPES |= {"bits": "*u8", "out_bits": "*u8", "sums": "*fp64", "counts": "*i64"}

# One rounding each: with .rn an operation may not be fused with another, and none flushes denormals or approximates.
ROUNDED = {
    "f32": r"(mul|add|sub|div|sqrt)\.rn\.f32",
    "f64": r"(mul|add|div|sqrt)\.rn\.f64",
    "exact": r"(neg|abs)\.f(32|64)|cvt\.f64\.f32|cvt\.rn\.f64\.[su](32|64)|cvt\.rn\.f32\.f64|set[pt][a-z.]*\.f(32|64)",
    "moved": r"(mov|ld|st|selp)[a-z0-9.:]*\.f(32|64)",
}


def compile_to_ptx(kernel: Any, given: dict[str, Any], capability: int, **options: Any) -> str:
    """The kernel's code for an NVIDIA GPU, which need not be there; it has been through ptxas as well."""
    names = kernel.arg_names
    constants = {(names.index(name),): value for name, value in given.items() if name in names}
    signature = {name: "constexpr" if name in given else TYPES.get(name, "*fp32") for name in names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=kernels._LAUNCH | options)
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def float_operations(ptx: str) -> set[str]:
    return set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][a-z0-9_.:]*\.f(?:16|32|64)(?:\.\w+)*|fma[.\w]*)\s", ptx, re.M))


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(("kernel", "given"), KERNELS)
def test_compiled_they_round_every_operation(kernel: Any, given: dict[str, Any]) -> None:
    ptx = compile_to_ptx(kernel, given, 90)
    operations = float_operations(ptx)
    assert any(".rn." in operation for operation in operations), operations
    odd = [each for each in operations if not re.fullmatch("|".join(ROUNDED.values()), each)]
    assert not odd, odd
    assert "ftz" not in ptx


@pytest.mark.usefixtures("_own_cache")
def test_with_fusion_the_compiler_would_not() -> None:
    """So that the test above is known to see it."""
    kernel, given = KERNELS[0].values
    ptx = compile_to_ptx(kernel, given, 80, enable_fp_fusion=False)
    assert not any(operation.startswith("fma") for operation in float_operations(ptx))
    fused = compile_to_ptx(kernel, given, 80, enable_fp_fusion=True)
    assert any(operation.startswith("fma") for operation in float_operations(fused))


# Which kernels serve a GPU.


@pytest.fixture
def _nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_codec, "_uses_triton", torch_codec._uses_triton.__wrapped__)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("HVD_ONEBIT_TRITON", raising=False)
    # making the tensors of torch operations would need the GPU
    monkeypatch.setattr(DeviceCodec, "__init__", lambda self, device: None)


@pytest.mark.usefixtures("_nothing_decided")
def test_a_gpu_is_served_by_triton(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvd_onebit"):
        assert type(codec_for(CUDA)) is TritonCodec
    assert caplog.messages == [f"using the Triton kernels, Triton {triton.__version__}"]


@pytest.mark.usefixtures("_nothing_decided")
@pytest.mark.parametrize("why", ["asked", "absent", "old", "another GPU", "another device"])
def test_else_by_torch_operations_and_it_says_why(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, said = CUDA, ""
    if why == "asked":
        monkeypatch.setenv("HVD_ONEBIT_TRITON", "0")
        said = "HVD_ONEBIT_TRITON=0: "
    elif why == "absent":
        monkeypatch.setitem(sys.modules, "triton", None)
        said = "Triton is not installed (pip install triton): "
    elif why == "old":
        monkeypatch.setattr(triton, "__version__", "3.3.1")
        said = "Triton 3.3.1 is too old (pip install 'triton>=3.6'): "
    elif why == "another GPU":
        monkeypatch.setattr(torch.version, "hip", "6.4")
        said = "the Triton kernels are for NVIDIA GPUs, and these tensors are elsewhere (cuda): "
    else:
        device = torch.device("meta")
        said = "the Triton kernels are for NVIDIA GPUs, and these tensors are elsewhere (meta): "
    with caplog.at_level(logging.INFO, "hvd_onebit"):
        assert type(codec_for(device)) is DeviceCodec
    assert caplog.messages == [f"{said}using torch operations, which give the same results in more passes over memory"]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvd_onebit"):
        torch_codec._uses_triton.cache_clear()
        codec_for(torch.device("meta"))
        codec_for(torch.device("meta"))
    assert len(caplog.messages) == 1
