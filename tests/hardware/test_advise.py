"""The advice: hardware first, then what the model needs, then where it goes, then where its weights come from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castwise._gemm import GemmRates, cache_file, measured_rates
from castwise._load import LoadError
from castwise._traits import LayerShape, ModelTraits, Need, misaligned, need_of, read_model, traits_of
from castwise.advise import (
    Advice,
    add_advise_arguments,
    advise,
    deployment_reasons,
    hardware_reasons,
    load_traits,
    main_advise,
    preference,
)
from castwise.errors import HardwareError
from castwise.formats import BF16, FP16, FP32
from castwise.hardware import detect, get_device

torch = pytest.importorskip("torch")
nn = torch.nn


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7)
        self.norm = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)


class Plain(nn.Module):
    """A convnet by its layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 48, 3)
        self.up = nn.PixelShuffle(4)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Conv1d(80, 64, 7)
        self.up = nn.ConvTranspose1d(64, 32, 16)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy_head = nn.Linear(16, 4)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.qkv = nn.Linear(16, 48)


def texts(advice: Advice, topic: str) -> str:
    return "\n".join(reason.text for reason in advice.reasons if reason.topic == topic)


# ---------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("model", "need", "says"),
    [
        (ResNet18, Need.either, "convnets do as well in fp16"),
        (Plain, Need.either, "no attention: convnets"),
        (Upscaler, Need.mantissa, "grey levels"),
        (Generator, Need.mantissa, "16-bit samples"),
        (ActorCritic, Need.mantissa, "RL policy"),
        (Tagger, Need.either, "recurrent layers make small gradients"),
        (Encoder, Need.either, "softmax stays in fp32"),
        (Routed, Need.range, "mixture of experts"),
    ],
)
def test_structure_and_names_tell_what_a_model_needs(model: type, need: Need, says: str) -> None:
    readings = read_model(traits_of(model()))
    assert need_of(readings) is need
    assert says in "\n".join(reading.text for reading in readings)


def test_a_model_of_unknown_kind_is_not_judged() -> None:
    assert read_model(traits_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))) == ()


def test_a_large_transformer_needs_range_and_a_small_one_does_not() -> None:
    small = ModelTraits(name="gpt", parameters=10_000_000, kinds={"attention": 12})
    large = ModelTraits(name="gpt", parameters=7_000_000_000, kinds={"attention": 32})
    assert need_of(read_model(small)) is Need.either
    assert need_of(read_model(large)) is Need.range
    assert "7 billion parameters" in read_model(large)[0].text


def test_attention_is_seen_as_a_class_as_a_path_and_as_bare_projections() -> None:
    class Head(nn.Linear):
        pass

    assert traits_of(nn.MultiheadAttention(8, 2)).has("attention")
    assert traits_of(nn.ModuleDict({"attn": nn.Module()})).has("attention")
    projections = traits_of(nn.ModuleDict({"qkv": Head(8, 24), "mlp": nn.Linear(8, 8)}))
    assert projections.kinds["attention"] == 1
    assert projections.kinds["linear"] == 2, "subclasses count as what they extend"


def test_traits_are_counted_without_running_the_model() -> None:
    traits = traits_of(ResNet18(), name="ResNet18")
    assert traits.parameters == sum(p.numel() for p in ResNet18().parameters())
    assert traits.dtypes == {"fp32": traits.parameters}
    assert traits.kinds == {"conv": 1, "batch_norm": 1, "linear": 1}
    assert traits.layers == (
        LayerShape("stem", "Conv2d", (("in_channels", 3), ("out_channels", 64))),
        LayerShape("fc", "Linear", (("in_features", 64), ("out_features", 10))),
    )


# ----------------------------------------------------------------------------------------------------- hardware first


@pytest.mark.parametrize(
    ("device", "fmt", "scaling"),
    [
        ("t4", FP16, True),
        ("v100", FP16, True),
        ("a100", BF16, False),
        ("h100", BF16, False),
        ("tpu_v4", BF16, False),
        ("m1", FP16, True),
        ("cpu_avx2", FP32, False),
        ("cpu_amx_bf16", BF16, False),
        ("jetson_nano", FP16, True),
    ],
)
def test_hardware_alone_decides_where_nothing_else_is_known(device: str, fmt: object, scaling: bool) -> None:
    advice = advise(get_device(device))
    assert (advice.format, advice.loss_scaling) == (fmt, scaling)
    assert advice.reasons[0].topic == "hardware"


@pytest.mark.parametrize("device", ["t4", "v100"])
@pytest.mark.parametrize("model", [Upscaler, Routed, ResNet18])
def test_no_model_gets_a_format_that_the_device_emulates(device: str, model: type) -> None:
    advice = advise(get_device(device), model=traits_of(model()))
    assert advice.format is FP16
    assert "bf16 is emulated" in texts(advice, "hardware")


def test_a_format_that_was_measured_slower_than_float32_is_not_chosen() -> None:
    device = get_device("cpu_avx512_bf16")
    slow = GemmRates(device.key, "torch", {"fp32": {64: 10.0, 256: 100.0}, "bf16": {64: 30.0, 256: 40.0}})
    assert advise(device).format is BF16
    advice = advise(device, measured=slow)
    assert advice.format is FP32
    assert "0.4x" in texts(advice, "measured") and "not chosen" in texts(advice, "measured")


def test_a_surprisingly_fast_emulation_is_told_and_still_not_chosen() -> None:
    device = get_device("cpu_avx2")
    fast = GemmRates(device.key, "torch", {"fp32": {256: 100.0}, "bf16": {256: 150.0}})
    advice = advise(device, measured=fast)
    assert advice.format is FP32
    assert "castwise doctor" in texts(advice, "measured")


def test_measured_rates_compare_at_the_largest_side_that_both_reached() -> None:
    rates = GemmRates("x", "torch", {"fp32": {64: 1.0, 128: 8.0, 256: 9.0}, "fp16": {64: 2.0, 128: 2.0}})
    assert rates.relative("fp16") == (0.25, 128)
    assert rates.relative("bf16") is None
    assert rates.peak("fp32") == 9.0


# ------------------------------------------------------------------------------------ then model, deployment, weights


def test_what_the_model_needs_decides_where_the_device_has_both() -> None:
    a100 = get_device("a100")
    assert advise(a100, model=traits_of(Upscaler())).format is FP16
    assert advise(a100, model=traits_of(Routed())).format is BF16
    assert advise(a100, model=traits_of(ResNet18())).format is BF16


def test_an_engine_that_takes_fp16_widely_tips_a_model_that_can_do_either() -> None:
    a100, resnet = get_device("a100"), traits_of(ResNet18())
    assert advise(a100, model=resnet, deploy="tensorrt").format is FP16
    assert advise(a100, model=resnet, deploy="onnxruntime").format is FP16
    assert advise(a100, model=resnet, deploy="edge").format is BF16
    routed = advise(a100, model=traits_of(Routed()), deploy="tensorrt")
    assert routed.format is BF16, "an engine does not outweigh the range that a model needs"
    assert "65504" in texts(routed, "deployment")


def test_weights_trained_in_bf16_stay_there_where_they_can_and_are_warned_of_where_not() -> None:
    model = Plain().to(torch.bfloat16)
    assert traits_of(model).pretrained is BF16
    stays = advise(get_device("a100"), model=traits_of(model), deploy="tensorrt")
    assert stays.format is BF16
    moved = advise(get_device("t4"), model=traits_of(model))
    assert moved.format is FP16
    assert "fp16 is risky" in texts(moved, "pretrained")
    assert "stored in bf16: train on float32 copies" in texts(moved, "pretrained")


def test_the_config_of_a_checkpoint_tells_what_it_was_trained_in() -> None:
    model = Plain()
    model.config = SimpleNamespace(torch_dtype="bfloat16", model_type="t5")
    traits = traits_of(model)
    assert traits.pretrained is BF16
    assert need_of(read_model(traits)) is Need.range
    model.config = SimpleNamespace(torch_dtype="int8", dtype=torch.float16)
    assert traits_of(model).pretrained is FP16


@pytest.mark.parametrize("need", list(Need))
@pytest.mark.parametrize("deploy", [None, "tensorrt", "onnxruntime", "edge"])
@pytest.mark.parametrize("pretrained", [None, FP16, BF16])
def test_need_outweighs_weights_and_weights_outweigh_deployment(
    need: Need, deploy: str | None, pretrained: object
) -> None:
    first, second = preference(need, deploy, pretrained)  # type: ignore[arg-type]
    assert {first, second} == {FP16, BF16}
    if need is not Need.either:
        assert first is (FP16 if need is Need.mantissa else BF16)
    elif pretrained is BF16:
        assert first is BF16
    else:
        assert first is (FP16 if deploy in ("tensorrt", "onnxruntime") else BF16)


def test_every_deployment_has_something_to_say_and_an_unknown_one_is_refused() -> None:
    for deploy in ("tensorrt", "onnxruntime", "edge"):
        assert deployment_reasons(deploy, FP16)
    with pytest.raises(HardwareError, match=r"Unknown deployment 'tensor_rt'.*tensorrt"):
        advise(get_device("t4"), deploy="tensor_rt")


def test_a_device_without_16_bit_arithmetic_is_told_that_studies_still_work() -> None:
    assert any("castwise study" in reason.text for reason in hardware_reasons(get_device("cpu_avx2")))


# ------------------------------------------------------------------------------------------------------------- shapes


def test_dimensions_that_miss_the_multiple_are_listed_with_what_would_do() -> None:
    advice = advise(get_device("v100"), model=traits_of(ResNet18()))
    assert [(miss.path, miss.dim, miss.size, miss.padded) for miss in advice.misses] == [
        ("stem", "in_channels", 3, 8),
        ("fc", "out_features", 10, 16),
    ]
    assert "2 dimensions are no multiple of 8" in texts(advice, "shapes")


def test_what_is_aligned_or_grouped_is_left_alone() -> None:
    aligned = nn.Sequential(nn.Linear(16, 32), nn.Conv2d(3, 6, 3, groups=3))
    assert misaligned(traits_of(aligned).layers, 8) == ()
    assert not advise(get_device("cpu_avx2"), model=traits_of(ResNet18())).misses, "no matrix units, no multiples"


# -------------------------------------------------------------------------------------------- measuring, command line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CASTWISE_CACHE", str(tmp_path))
    return cache_file()


def test_products_are_measured_once_and_remembered(cache: Path) -> None:
    device, threads = detect("cpu"), torch.get_num_threads()
    first = measured_rates(device)
    assert first is not None and {"fp32", "bf16", "fp16"} <= set(first.rates)
    assert all(rate > 1e6 for sides in first.rates.values() for rate in sides.values())
    assert torch.get_num_threads() == threads
    written = cache.read_text()
    assert measured_rates(device) == first
    assert cache.read_text() == written, "the second question measures nothing"


def test_a_spoilt_cache_is_told_and_measured_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("{not json")
    assert measured_rates(detect("cpu")) is not None
    assert "cannot be read" in caplog.text
    assert json.loads(cache.read_text())["schema"] == 1


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_advise_arguments(parser)
    return main_advise(parser.parse_args(arguments))


def test_the_command_prints_the_advice_and_its_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nclass UNet(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = torch.nn.Conv2d(3, 12, 3)\n"
    )
    assert run(f"{path}:UNet", "--device", "t4", "--deploy", "tensorrt") == 0
    out = capsys.readouterr().out
    assert "Advice  train in float16, with loss scaling." in out
    assert "65 TFLOP/s" in out and "TensorRT takes FP16" in out and "a (Conv2d): in_channels 3 -> 8" in out
    assert max(map(len, out.splitlines())) < 260, "one reason a line"


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digits", "--device", "a100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["loss_scaling"], found["device"]) == ("bf16", False, "a100")
    assert {"path": "head", "kind": "Linear", "dim": "out_features", "size": 10, "padded": 16} in found["misaligned"]


def test_the_command_lists_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list-devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["t4", "fp16"] for line in lines)
    assert any(line.split()[:2] == ["cpu_avx2", "fp32"] for line in lines)


def test_the_command_without_arguments_speaks_of_this_machine(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert detect().name in out and "Measured here" in out


def test_a_misspelt_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(LoadError, match=r"'digit'.*Did you mean 'digits'"):
        load_traits("digit")


def test_built_in_tasks_are_read() -> None:
    digits, text = load_traits("digits"), load_traits("text")
    assert digits.has("conv") and not digits.has("attention")
    assert text.has("attention")


def test_a_study_is_proposed_of_a_task_and_not_of_a_model_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 4)\n"
        "class Mine:\n    def model(self, seed): return Net()\n    def batches(self, seed): return []\n"
    )
    assert run(f"{path}:Net", "--device", "t4") == 0
    assert "castwise study TASK " in capsys.readouterr().out
    assert run(f"{path}:Mine", "--device", "t4") == 0
    assert f"castwise study {path}:Mine " in capsys.readouterr().out


def test_lazy_modules_are_read_as_far_as_their_sizes_are_known(caplog: pytest.LogCaptureFixture) -> None:
    found = traits_of(
        nn.Sequential(nn.LazyConv2d(12, 3), nn.LazyLinear(10), nn.Linear(10, 10, bias=False)), name="lazy"
    )
    assert found.parameters == 100
    assert [layer.dims for layer in found.layers[:2]] == [(("out_channels", 12),), (("out_features", 10),)]
    assert "lazy: 4 parameters of lazy modules have no size yet" in caplog.text


def test_a_built_in_task_without_torch_names_the_extra(run_python: Any) -> None:
    done = run_python(
        "import sys; from castwise.cli import main; sys.exit(main(['advise', 'digits', '--device', 't4']))",
        hidden="name == 'torch'",
    )
    assert done.returncode == 1
    assert "pip install 'castwise[study]'" in done.stderr
