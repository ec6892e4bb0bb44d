"""What programs do beside ordinary training: constants of other kinds, quantized parts, copies and pickles of
contexts.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, library, nn
from torch.nn.functional import hardshrink, pad, threshold
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

from castwise.errors import CastwiseError, PolicyError
from castwise.policy import Policy
from castwise.torch import Amp, autocast, is_autocast_enabled, register_op
from castwise.torch.autocast import _known

LOWEST = torch.finfo(torch.float16).min


def scores() -> Tensor:
    """A float16 activation, made in the region that is active."""
    torch.manual_seed(0)
    return torch.randn(3, 4) @ torch.randn(4, 4)


WRITES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "masked_fill": lambda h, v: h.masked_fill(torch.ones(3, 4).bool(), v),
    "full_like": lambda h, v: torch.full_like(h, v),
    "fill_": lambda h, v: h.fill_(v),
    "pad": lambda h, v: pad(h, (0, 1), value=v)[:, -1:],
    "clamp": lambda h, v: h.clamp(max=v),
}


@pytest.mark.parametrize(
    "value", [np.float32(-1e9), np.float64(-1e9), np.int64(-(10**9))], ids=["float32", "float64", "int64"]
)
@pytest.mark.parametrize("op", WRITES)
def test_numpy_constants_beyond_float16_become_its_lowest_value(op: str, value: Any) -> None:
    with autocast("cpu", torch.float16):
        written = WRITES[op](scores(), value)
    assert written.dtype is torch.float16
    assert bool((written == LOWEST).all())


STORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda h, v: h.masked_fill(torch.ones_like(h, dtype=torch.bool), v),
    "where": lambda h, v: torch.where(torch.ones_like(h, dtype=torch.bool), v, h),
    "setitem": lambda h, v: (h.__setitem__(slice(None), v), h)[1],
    "setitem, one row": lambda h, v: (h.__setitem__(torch.tensor(1), v), h)[1][1],
    "index_fill": lambda h, v: h.index_fill(0, torch.tensor(1), v)[1],
    "fill_": lambda h, v: h.fill_(v),
    "add": lambda h, v: torch.zeros_like(h) + v,
    "clamp": lambda h, v: h.clamp(max=v),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float32])
@pytest.mark.parametrize("op", STORES)
def test_constants_in_tensors_beyond_float16_become_its_lowest_value(op: str, dtype: torch.dtype) -> None:
    with autocast("cpu", torch.float16):
        written = STORES[op](scores(), torch.tensor(-(10**9), dtype=dtype))
    assert written.dtype is torch.float16
    assert bool((written == LOWEST).all())


PADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "pad_sequence": lambda h: pad_sequence([h, h[:1]], batch_first=True, padding_value=-1e9)[1, 1:],
    "pad_packed_sequence": lambda h: pad_packed_sequence(pack_sequence([h, h[:1]]), True, padding_value=-1e9)[0][1, 1:],
    "nested": lambda h: torch.nested.nested_tensor([h, h[:1]], layout=torch.jagged).to_padded_tensor(-1e9)[1, 1:],
    "full": lambda h: torch.full((2, 2), -1e9, dtype=h.dtype),
    "threshold": lambda h: threshold(h, 100.0, -1e9),
}


@pytest.mark.parametrize("op", PADDED)
def test_padding_beyond_float16_becomes_its_lowest_value(op: str) -> None:
    with autocast("cpu", torch.float16):
        padding = PADDED[op](scores())
    assert padding.dtype is torch.float16
    assert bool((padding == LOWEST).all())


def test_a_shrinkage_beyond_float16_leaves_nothing() -> None:
    with autocast("cpu", torch.float16):
        assert not hardshrink(scores(), 1e9).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "lstm"])
def test_quantized_layers_take_low_activations(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    model = nn.Sequential(nn.LSTM(8, 8) if kind == "lstm" else nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM}, torch.qint8)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        wide = quantized(first(x))
        with autocast("cpu", dtype):
            low = quantized(first(x))
    wide, low = (y[0] if kind == "lstm" else y for y in (wide, low))
    torch.testing.assert_close(low.float(), wide, rtol=0.05, atol=0.05)


class Contained(nn.Module):
    """A model that holds its context."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.context = autocast("cpu", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with self.context:
            assert x.shape[-1] == 4 and x.device.type == "cpu"
            return self.linear(x)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_used_model_that_holds_a_context_can_be_copied(way: Callable[[Any], Any], inside: bool) -> None:
    model, x = Contained(), torch.randn(2, 4)
    expected = model(x)
    if inside:
        with model.context:
            twin = way(model)
    else:
        twin = way(model)
    assert not is_autocast_enabled()
    assert torch.equal(twin(x), expected) and expected.dtype is torch.bfloat16
    assert (x @ x.mT).dtype is torch.float32
    assert twin.context.rules is model.context.rules  # one table of decisions, not one per copy


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_amp_that_is_copied_says_what_to_copy_instead(way: Callable[[Any], Any]) -> None:
    model = nn.Linear(4, 2)
    amp = Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bfloat16")
    with pytest.raises(CastwiseError, match=r"cannot be copied or pickled.*amp.save"):
        way(amp)
    model.held = [amp]  # type: ignore[assignment]
    with pytest.raises(CastwiseError, match="hold it elsewhere"):
        copy.deepcopy(model)


def test_leaving_a_context_that_was_not_entered_says_so() -> None:
    context = autocast("cpu", torch.bfloat16)
    with pytest.raises(CastwiseError, match="has not entered it"):
        context.__exit__(None, None, None)
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except CastwiseError as error:
            errors.append(error)

    with context:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert is_autocast_enabled()
    assert len(errors) == 1 and not is_autocast_enabled()


# ---- custom ops that write -------------------------------------------------------------------------------------------


@library.custom_op("castwise_tests::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y.to(x.dtype))


@library.custom_op("castwise_tests::add_onto", mutates_args=("out",))
def add_onto(x: Tensor, out: Tensor) -> None:
    out.add_(x.to(out.dtype))


@pytest.mark.parametrize("rule", ["low", "high", "widest", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_custom_op_writes_into_what_it_was_given(rule: str, dtype: torch.dtype) -> None:
    register_op(add_into, rule)
    x = torch.zeros(3, dtype=dtype)
    with autocast("cpu", torch.float16):
        add_into(x, torch.ones(3))
    assert torch.equal(x, torch.ones(3, dtype=dtype))


def test_an_op_that_writes_another_argument_is_left_alone_and_takes_no_rule() -> None:
    with pytest.raises(CastwiseError, match=r"add_onto.*argument 1.*\"keep\""):
        register_op(add_onto, "low")
    out = torch.zeros(3, dtype=torch.float16)
    with autocast("cpu", torch.float16):
        add_onto(torch.ones(3), out)
    assert torch.equal(out, torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("rule", [None, 3])
def test_a_rule_that_is_no_name_is_refused(rule: Any) -> None:
    with pytest.raises(CastwiseError, match="is no name"):
        register_op(torch.matmul, rule)


# ---- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_probabilities_are_told_once_with_a_rule_that_mends_them(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castwise.torch._told.TOLD", told := {"binary_cross_entropy"})
    monkeypatch.setattr("castwise.torch._calls.TOLD", told)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    x, labels = torch.ones(2, 4), torch.zeros(2, 1)
    with autocast("cpu", dtype):
        assert float(torch.nn.functional.binary_cross_entropy(model(x), labels).detach()) == 100.0  # torch's bound
        torch.nn.BCELoss()(model(x), labels)
    (said,) = [r.getMessage() for r in caplog.records if "binary_cross_entropy" in r.getMessage()]
    assert "BCEWithLogitsLoss" in said and "sigmoid = 'high'" in said
    with autocast("cpu", policy=Policy(format=dtype, ops={"sigmoid": "high"})):
        mended = torch.nn.BCELoss()(model(x), labels)
    torch.testing.assert_close(mended, torch.nn.BCELoss()(model(x), labels), rtol=2e-2, atol=0.0)


# ---- devices that are not there --------------------------------------------------------------------------------------


def test_a_device_type_that_is_none_is_refused_with_how_to_say_it() -> None:
    for wrong in ("bfloat16", "gpu"):
        with pytest.raises(PolicyError, match=rf"no type of device '{wrong}'.*Give the device first"):
            autocast(wrong, dtype=torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that CUDA is missing")
def test_a_region_for_a_device_that_is_missing_is_told_once_and_an_island_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _known.cache_clear()
    autocast("cuda", enabled=False)
    assert not caplog.records
    for _ in range(2):
        autocast("cuda:0", dtype=torch.float16)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "has no cuda" in said and "not cast" in said
