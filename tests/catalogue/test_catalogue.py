"""The decision rule, the data's own consistency, and what a reader is told about data that is wrong."""

from __future__ import annotations

import pickle
import re
import time

import pytest

from castwise._catalogue_data import parse_catalogue
from castwise.catalogue import (
    EIGHT_BITS,
    HAZARDS,
    NARROW_RANGE,
    NO_ARITHMETIC,
    PRODUCTS,
    SHORT_MANTISSA,
    Mixed,
    OpClass,
    Rule,
    default_rule,
    load_catalogue,
    torch_base_name,
)
from castwise.errors import CatalogueError
from castwise.formats import FORMATS, FP32

CATALOGUE = load_catalogue()
ENTRIES = list(CATALOGUE.entries.values())


def rule(name: str, fmt: str) -> Rule:
    return default_rule(CATALOGUE.entries[name], fmt)


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["matmul", "linear", "conv2d", "scaled_dot_product_attention", "lstm", "prelu"])
def test_products_run_low_in_every_16_bit_format(name):
    assert rule(name, "fp16") == rule(name, "bf16") == Rule.LOW


def test_fused_kernels_keep_more_than_8_bits_where_bare_products_do_not():
    for fmt in EIGHT_BITS:
        assert rule("matmul", fmt) == rule("conv2d", fmt) == Rule.LOW
        assert rule("scaled_dot_product_attention", fmt) == rule("lstm", fmt) == Rule.HIGH


@pytest.mark.parametrize("name", ["pow", "square", "reciprocal", "rsqrt", "sinh", "cosh", "tan", "softplus"])
def test_range_hazards_widen_fp16_and_leave_bf16_alone(name):
    assert rule(name, "fp16") == Rule.HIGH
    assert rule(name, "bf16") == Rule.WIDEST


@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "log_softmax", "logsumexp", "log", "log1p", "exp", "cross_entropy", "mse_loss", "layer_norm"),
        *("group_norm", "rms_norm", "sum", "mean", "prod", "cumsum", "cumprod", "var", "std", "norm", "cdist"),
        *("renorm", "erfinv", "acos"),
    ],
)
def test_mantissa_hazards_widen_both_16_bit_formats(name):
    assert rule(name, "fp16") == rule(name, "bf16") == Rule.HIGH


@pytest.mark.parametrize("name", ["pow", "sum", "exp", "norm", "linalg_vector_norm"])
def test_what_overflows_fp16_on_cpu_runs_high(name):
    assert rule(name, "fp16") == Rule.HIGH


@pytest.mark.parametrize(
    "name", ["add", "relu", "gelu", "scatter_add", "index_put", "cat", "max_pool2d", "batch_norm", "dot"]
)
def test_what_has_no_hazard_follows_its_inputs(name):
    assert rule(name, "fp16") == rule(name, "bf16") == Rule.WIDEST


def test_linear_algebra_and_fourier_transforms_run_high_in_every_format():
    for entry in [*CATALOGUE.of_class(OpClass.LINALG), *CATALOGUE.of_class(OpClass.FFT)]:
        assert {default_rule(entry, fmt) for fmt in (*SHORT_MANTISSA, "fp32")} == {Rule.HIGH}


def test_wide_formats_endanger_nothing():
    for entry in ENTRIES:
        assert not {"fp32", "fp64"} & set(entry.hazards)


def test_the_formats_that_hazards_endanger_are_those_whose_layout_says_so():
    narrow = {name for name, fmt in FORMATS.items() if fmt.exponent_bits < FP32.exponent_bits}
    short = {name for name, fmt in FORMATS.items() if 2 * fmt.mantissa_bits <= FP32.mantissa_bits}
    assert set(NARROW_RANGE) == narrow and set(SHORT_MANTISSA) == short
    assert set(EIGHT_BITS) == {name for name, fmt in FORMATS.items() if fmt.bits == 8}


def test_batch_norm_keeps_fp32_parameters_beside_a_16_bit_input():
    entry = CATALOGUE.entries["batch_norm"]
    assert entry.mixed is Mixed.KEEP and entry.accumulates_wide and not entry.promotes


# ---- consistency -----------------------------------------------------------------------------------------------------


def test_every_entry_says_why():
    assert [entry.name for entry in ENTRIES if not entry.note] == []


def test_an_entry_is_a_value():
    for entry in ENTRIES[:: len(ENTRIES) // 20]:
        assert pickle.loads(pickle.dumps(entry)) == entry
        assert hash(pickle.loads(pickle.dumps(entry))) == hash(entry)


def test_an_op_without_arithmetic_has_no_hazard_in_its_own_right():
    """Hazards belong to arithmetic. The exception draws from a distribution by a series."""
    hazardous = {entry.name for entry in ENTRIES if entry.op_class in NO_ARITHMETIC and entry.hazards}
    assert hazardous == {"random_gamma"}


def test_what_only_selects_values_has_no_hazard_and_no_sum():
    for entry in ENTRIES:
        if entry.selects:
            assert not entry.hazards and entry.accumulates_wide and not entry.product, entry.name


def test_views_select_and_keep_formats():
    for entry in CATALOGUE.of_class(OpClass.VIEW):
        assert entry.view and entry.selects and not entry.promotes


def test_an_explicit_rule_is_never_what_would_have_been_decided_anyway():
    """A `rule` that changes nothing hides the reason that decides. Optimizer updates state it: none may be cast."""
    for entry in ENTRIES:
        if entry.rule is not None and not entry.name.startswith(("_foreach_", "_fused_", "_amp_")):
            product = entry.op_class in PRODUCTS
            plain = {
                Rule.LOW if product else Rule.HIGH if entry.hazards.get(fmt) else Rule.WIDEST for fmt in NARROW_RANGE
            }
            assert plain != {entry.rule}, entry.name


def test_composites_hold_what_their_inside_decides():
    assert CATALOGUE.entries["multi_head_attention_forward"].composite
    assert not CATALOGUE.entries["scaled_dot_product_attention"].composite


# ---- looking up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("softmax", "softmax"),
        ("aten::_softmax.out", "softmax"),
        ("torch.Tensor.add_", "add"),
        ("__iadd__", "add"),
        ("__rsub__", "sub"),
        ("__matmul__", "matmul"),
        ("__setitem__", "index_put"),
        ("__getitem__", "index"),
        ("nn.functional.cross_entropy", "cross_entropy"),
        ("torch.linalg.norm", "linalg_norm"),
        ("fft.rfft2", "fft_rfft2"),
        ("special.expit", "sigmoid"),
        ("aten::sum.dim_IntList", "sum"),
        ("aten::norm.ScalarOpt_dim", "norm"),
        ("aten::convolution_backward", "convolution_backward"),
        ("aten::gelu_backward", "gelu"),
        ("aten::native_layer_norm_backward", "layer_norm"),
        ("aten::_softmax_backward_data", "softmax_backward"),
        ("concat", "cat"),
    ],
)
def test_a_torch_spelling_finds_its_entry(spelling, name):
    entry = CATALOGUE.lookup("torch", spelling)
    assert entry is not None and entry.name == name


@pytest.mark.parametrize(
    ("framework", "spelling", "name"),
    [
        ("jax", "dot_general", "matmul"),
        ("jax", "conv_general_dilated", "convolution"),
        ("jax", "scatter-add", "scatter_add"),
        ("jax", "integer_pow", "pow"),
        ("tensorflow", "FusedBatchNormV3", "batch_norm"),
        ("tensorflow", "AddV2", "add"),
        ("onnx", "Gemm", "addmm"),
        ("onnx", "ReduceLogSumExp", "logsumexp"),
    ],
)
def test_other_frameworks_spellings_find_the_same_entries(framework, spelling, name):
    entry = CATALOGUE.lookup(framework, spelling)
    assert entry is not None and entry.name == name


def test_an_unknown_op_is_none_and_an_unknown_framework_an_error():
    assert CATALOGUE.lookup("torch", "my_own_op") is None
    assert CATALOGUE.lookup("jax", "softmax") is None  # a function of jax.nn, not a primitive
    with pytest.raises(CatalogueError, match=r"'pytorch'.*torch, jax"):
        CATALOGUE.lookup("pytorch", "softmax")


def test_a_misspelt_op_gets_suggestions():
    assert CATALOGUE.suggest("sofmax")[0] == "softmax"
    assert "embedding_bag" in CATALOGUE.suggest("embeding_bag")
    assert CATALOGUE.suggest("DepthwiseConv2d")[0] == "depthwise_conv2d"
    assert "batch_norm" in CATALOGUE.suggest("FusedBatchNormV4")  # by TensorFlow's spelling
    assert CATALOGUE.suggest("zzzzqqqq") == []


def test_every_torch_spelling_is_already_a_base_name():
    """What lookup strips from a name must not be part of a spelling, or that spelling could never be found."""
    for entry in ENTRIES:
        for spelling in entry.names.get("torch", ()):
            assert torch_base_name(f"aten::{spelling}.overload") == spelling


def test_only_torch_promotes_by_itself():
    entry = CATALOGUE.entries["add"]
    assert entry.promotes and entry.promotes_natively("torch")
    assert not entry.promotes_natively("jax") and not entry.promotes_natively("onnx")


def test_reading_the_catalogue_is_quick():
    """A loose bound: it takes some 40 ms of processor time on one slow core."""
    from castwise._catalogue_data import read_catalogue

    start = time.process_time()
    read_catalogue()
    assert time.process_time() - start < 0.5


# ---- data that is wrong ----------------------------------------------------------------------------------------------

GROUP = '[[group]]\nclass = "matmul"\nwhy = "a product"\n[group.ops]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GROUP + 'bmm = {hasard = "range"}', r"'bmm'.*'hasard'.*hazard"),
        (GROUP + 'bmm = {hazard = "overflow"}', r"'bmm'.*'overflow'.*range or mantissa"),
        (GROUP + "bmm = {hazard = 3}", r"'bmm'.*hazard is 3.*one string"),
        (GROUP + 'bmm = {class = "product"}', r"'bmm'.*class is 'product'.*matmul"),
        (GROUP + 'bmm = {rule = "fp16"}', r"'bmm'.*rule is 'fp16'.*low, high, widest"),
        (GROUP + 'bmm = {mixed = "no"}', r"'bmm'.*mixed is 'no'.*keep"),
        (GROUP + 'bmm = {selects = "yes"}', r"'bmm'.*selects is 'yes'.*true or false"),
        (GROUP + 'bmm = {torch = ["bmm"]}', r"'bmm'.*torch is \['bmm'\].*one string"),
        (GROUP + 'bmm = {torch = ""}', r"'bmm'.*no framework spells it"),
        (GROUP + "bmm = 1", r"'bmm'.*Write a table"),
        (GROUP + 'bmm = {}\nmm = {torch = "mm bmm"}', r"'mm'.*torch spelling 'bmm' also belongs to 'bmm'"),
        ('[[group]]\nclass = "matmul"\nwhy = "x"\nplain = "bmm bmm"', r"'bmm'.*defined twice"),
        (GROUP + "bmm = {}\n" + GROUP + "bmm = {}", r"'bmm'.*defined twice"),
        ('[[group]]\nclass = "matmul"\nplain = "bmm mm"', r"'bmm mm'.*no reason"),
        ('[[group]]\nwhy = "x"\nplain = "bmm"', r"'bmm'.*class is None"),
        ('[[group]]\nclass = "matmul"\nwhy = "x"\nops = "bmm"', r"ops is 'bmm'"),
    ],
)
def test_an_error_in_the_data_names_the_entry_and_the_remedy(text, message):
    with pytest.raises(CatalogueError, match=message):
        parse_catalogue("schema = 1\n" + text)


def test_text_that_is_not_toml_and_another_schema_are_refused():
    with pytest.raises(CatalogueError, match=r"catalogue\.toml is not valid TOML: Invalid value"):
        parse_catalogue("schema =")
    with pytest.raises(CatalogueError, match=r"schema is 2.*reads schema 1"):
        parse_catalogue("schema = 2")


def test_measured_kernels_of_an_op_without_entry_are_refused():
    kernels = 'torch = "2.13.0"\n[cpu]\nbf16 = "bmm gone"\n'
    with pytest.raises(CatalogueError, match=r"'gone'.*generate_no_kernel"):
        parse_catalogue("schema = 1\n" + GROUP + "bmm = {}", kernels)
    bmm = parse_catalogue("schema = 1\n" + GROUP + "bmm = {}\ngone = {}", kernels).entries["bmm"]
    assert (
        bmm.lacks_kernel("bf16", "cpu") and not bmm.lacks_kernel("bf16", "cuda") and not bmm.lacks_kernel("fp16", "cpu")
    )


def test_an_op_overrides_what_its_group_says():
    group = '[[group]]\nclass = "norm"\nhazard = "range"\nwhy = "x"\n[group.ops]\n'
    text = "schema = 1\n" + group + 'a = {}\nb = {hazard = "", class = "pool"}'
    entries = parse_catalogue(text).entries
    assert set(entries["a"].hazards) == set(HAZARDS["range"]) and not entries["b"].hazards
    assert (entries["a"].op_class, entries["b"].op_class) == (OpClass.NORM, OpClass.POOL)
    assert re.fullmatch("x", entries["b"].note)
