"""The instruction sets that are read are those of the machine and of LLVM's names, and each choice follows from them."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, sum_bound
from regard.compiled import kernel_choice, processor
from regard.compiled.processor import AMX, AVX2, AVX512, PROCESSORS, narrow_features
from regard.matmul import linear

HOST = AVX512 | {"avx512vnni", "avx512bf16"}
TILES = AMX - HOST
SETS = st.frozensets(st.sampled_from(sorted(HOST)))


@given(
    SETS, st.sampled_from([None, "generic", "an-unknown-one", *PROCESSORS]), st.none() | st.lists(st.sampled_from(sorted(HOST)))
)
def test_a_setting_narrows_the_host_and_never_adds_to_it(host, name, taken):
    listed = None if taken is None else ",".join(f"-{one}" for one in taken)
    found = narrow_features(host, name, listed)
    assert found <= host
    assert not (taken and found & set(taken))


def test_the_host_has_the_instruction_sets_that_llvm_finds_on_it():
    binding = pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed: pip install 'regard[fast]'")
    found = {name for name, there in binding.get_host_cpu_features().items() if there}
    assert processor.read_host_features() & (HOST | TILES) == found & (HOST | TILES)


@pytest.mark.parametrize("name", PROCESSORS)
def test_llvm_compiles_vectors_for_a_name_into_the_registers_that_it_stands_for(name):
    binding = pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed: pip install 'regard[fast]'")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    code = """
        target triple = "x86_64-unknown-linux-gnu"
        define void @product(ptr %a, ptr %b) {
          %x = load <16 x float>, ptr %a
          %y = load <16 x float>, ptr %b
          %z = fmul contract <16 x float> %x, %y
          %s = fadd contract <16 x float> %z, %y
          store <16 x float> %s, ptr %a
          ret void
        }"""
    machine = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=name)
    assembly = machine.emit_assembly(binding.parse_assembly(code))
    widest = next(one for one in ("zmm", "ymm", "xmm") if one in assembly)
    assert widest == ("zmm" if "avx512f" in PROCESSORS[name] else "ymm")
    assert bool(re.search("vfmadd", assembly)) == ("fma" in PROCESSORS[name])


@pytest.mark.parametrize(
    ("found", "lanes", "rows", "pairs", "instruction"),
    [
        (frozenset(), 4, 4, False, None),
        (frozenset({"neon"}), 4, 8, False, None),
        (AVX2, 8, 4, False, "llvm.x86.avx2.pmadd.wd"),
        (AVX512, 16, 8, False, "llvm.x86.avx512.pmaddw.d.512"),
        (HOST, 16, 8, True, "llvm.x86.avx512.pmaddw.d.512"),
        (HOST - {"avx512f"}, 8, 4, False, "llvm.x86.avx2.pmadd.wd"),
        (HOST - {"avx512bw"}, 16, 8, False, None),
    ],
)
def test_registers_and_instructions_are_chosen_by_what_is_there(monkeypatch, found, lanes, rows, pairs, instruction):
    monkeypatch.setattr(processor, "read_features", lambda: found)
    assert kernel_choice.count_float32_lanes() == lanes
    assert kernel_choice.choose_tile_rows() == rows
    assert kernel_choice.has_bfloat16_products() == pairs
    assert kernel_choice.find_int16_instruction() == instruction


@pytest.mark.parametrize(
    ("vendor", "name", "is_intel"),
    [
        ("GenuineIntel", "Intel(R) Xeon(R) CPU @ 2.50GHz", True),
        ("AuthenticAMD", "AMD EPYC", False),
        ("", "Intel(R) Core(TM) i7", True),
        ("", "Apple M2", False),
    ],
)
@pytest.mark.parametrize("found", [AVX2, AVX512])
def test_products_go_to_onednn_where_it_was_measured_to_be_faster(monkeypatch, tmp_path, vendor, name, is_intel, found):
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: {name}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "read_processor_name", lambda: name)
    monkeypatch.setattr(processor, "read_features", lambda: found)
    assert processor.is_intel() == is_intel
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    measured = (math.inf if found == AVX512 else 64) if has_both and not is_intel else 0
    assert kernel_choice.find_onednn_limit.__wrapped__() == measured


@pytest.mark.parametrize("limit", [0, 6, 7, math.inf])
def test_a_product_is_the_same_by_either_library(monkeypatch, limit):
    if limit and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(kernel_choice, "find_onednn_limit", lambda: limit)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 127), torch.randn(521, 127), torch.randn(521)
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert_within(linear(x, weight, bias), exact, sum_bound(torch.float32, 128) * size)


NARROWED = """
import torch
from regard.compiled import kernel_choice
from regard.matmul import QuantizedLinear

torch.manual_seed(0)
x, small = torch.randn(9, 768), QuantizedLinear.from_weight(torch.randn(521, 768))
exact = x.double() @ small.dequantize_rows(slice(None), torch.float64).T
print(kernel_choice.count_float32_lanes(), bool(((small(x) - exact).abs() < exact.abs().max() * 2**-12).all()))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512f" not in processor.read_host_features(), reason="this processor has no AVX-512 to leave out")
@pytest.mark.parametrize(
    ("setting", "lanes"),
    [
        ({"NUMBA_ENABLE_AVX": "0"}, 4),
        ({"NUMBA_CPU_FEATURES": "-avx512f"}, 8),
        ({"NUMBA_CPU_NAME": "haswell"}, 8),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}, 8),
        ({"NUMBA_CPU_NAME": "generic"}, 4),
    ],
    ids=str,
)
def test_numbas_own_settings_are_followed(setting, lanes):
    """By the cache that all tests share, whose keys hold the settings: what an emulated processor needs is compiled once."""
    pytest.importorskip("numba", reason="numba is not installed: pip install 'regard[fast]'")
    settings = {name for name in os.environ if name.startswith("NUMBA_")} - {"NUMBA_CACHE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in settings} | setting
    ran = subprocess.run([sys.executable, "-c", NARROWED], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [str(lanes), "True"], ran.stderr


def test_compiled_products_use_no_tiles_that_linux_refuses(monkeypatch):
    monkeypatch.setattr(processor, "read_features", lambda: AMX)
    for is_allowed in (True, False):
        kernel_choice.can_use_tiles.cache_clear()
        monkeypatch.setattr(processor, "request_tiles", lambda is_allowed=is_allowed: is_allowed)
        assert kernel_choice.can_use_tiles() == is_allowed
        assert (kernel_choice.count_least_vectors_for_tiles(torch.bfloat16) > 0) == is_allowed
        assert kernel_choice.has_tiles()  # torch's products ask for themselves
    kernel_choice.can_use_tiles.cache_clear()


@pytest.mark.parametrize("missing", ["amx-tile", "amx-bf16", "avx512fp16", "avx512bf16", "avx512bw", "avx512f"])
def test_compiled_products_use_no_tiles_without_one_of_their_instructions(monkeypatch, missing):
    monkeypatch.setattr(processor, "read_features", lambda: AMX - {missing})
    monkeypatch.setattr(processor, "request_tiles", lambda: pytest.fail("there is nothing to ask Linux for"))
    kernel_choice.can_use_tiles.cache_clear()
    assert not kernel_choice.can_use_tiles()
    kernel_choice.can_use_tiles.cache_clear()
