"""Plans of the kinds of models that people have: what ran is the plan, within its error, however they are called."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from castwise.torch import apply
from castwise.torch._verify import Verifier
from castwise.torch.planning import plan, prepare

from .test_plan_apply import as_arguments, leaves, mixed

transformers = pytest.importorskip("transformers")


class UNet(nn.Module):
    """Down, through, and up again beside what was kept on the way down."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.inside, self.norm = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = F.silu(self.enter(x))
        inside = F.silu(self.norm(self.inside(F.silu(self.down(kept)))))
        wide = F.interpolate(inside, scale_factor=1.0, mode="nearest")
        return self.leave(torch.cat((self.up(wide), kept), 1))


class Bottleneck(nn.Module):
    """Narrower inside, added to what came in."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        width = outside // 4
        self.reduce, self.middle = nn.Conv2d(inside, width, 1, bias=False), nn.Conv2d(width, width, 3, stride, 1)
        self.expand, self.skip = nn.Conv2d(width, outside, 1, bias=False), nn.Conv2d(inside, outside, 1, stride)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (width, width, outside, outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.reduce(x)), inplace=True)
        y = self.norms[2](self.expand(F.relu(self.norms[1](self.middle(y)), inplace=True)))
        y += self.norms[3](self.skip(x))
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """Bottlenecks after a strided stem, with what torchvision's does in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(nn.MaxPool2d(3, 2, 1), Bottleneck(16, 32, 1), Bottleneck(32, 64, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Detector(nn.Module):
    """Boxes and classes at two scales, the best few of which come out."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.boxes, self.scores = nn.Conv2d(width, 4, 1), nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = [F.relu(self.first(x))]
        scales.append(F.relu(self.second(scales[0])))
        boxes = torch.cat([self.boxes(s).flatten(2) for s in scales], 2).transpose(1, 2)
        scores = torch.cat([self.scores(s).flatten(2) for s in scales], 2).transpose(1, 2).sigmoid()
        best = scores.amax(-1).topk(5, dim=1).indices
        chosen = boxes.exp().gather(1, best[..., None].expand(-1, -1, 4))
        return {"boxes": boxes, "scores": scores, "chosen": chosen}


class Recommender(nn.Module):
    """Large tables, a few rows of which are read, and a small network on their products."""

    def __init__(self, rows: int = 20_000, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.EmbeddingBag(rows, width, mode="sum")
        self.top = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(items)
        return self.top(torch.cat((u, i, u * i), 1))


def language(name: str) -> tuple[nn.Module, Any]:
    t = transformers
    ids = torch.randint(2, 100, (2, 12))
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 8:] = 0
        model = t.BertForSequenceClassification(t.BertConfig(**size, intermediate_size=64))
        return model, {"input_ids": ids, "attention_mask": mask}
    if name == "gpt2":
        config = t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None)
        return t.GPT2LMHeadModel(config), {"input_ids": ids}
    if name == "llama":
        config = t.LlamaConfig(**size, intermediate_size=64, num_key_value_heads=1, eos_token_id=None)
        return t.LlamaForCausalLM(config), {"input_ids": ids}
    if name == "vit":
        size.pop("vocab_size")
        model = t.ViTForImageClassification(t.ViTConfig(**size, intermediate_size=64, image_size=16, patch_size=4))
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        config = t.WhisperConfig(
            vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
            max_source_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
        )  # fmt: skip
        model = t.WhisperForConditionalGeneration(config)
        return model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids}
    config = t.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, eos_token_id=None,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids[:, :5]}


def family(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "unet":
        return UNet(), (torch.randn(2, 3, 16, 16),)
    if name == "resnet":
        return ResNet(), (torch.randn(4, 3, 32, 32),)
    if name == "detector":
        return Detector(), (torch.randn(2, 3, 16, 16),)
    if name == "recommender":
        return Recommender(), (torch.randint(20_000, (8,)), torch.randint(20_000, (8, 4)))
    model, inputs = language(name)
    return model.eval(), inputs  # without dropout, whose noise would hide that of rounding


FAMILIES = ("resnet", "unet", "detector", "recommender", "bert", "gpt2", "llama", "t5", "vit", "whisper")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ran_is_the_plan_and_its_error_is_as_predicted(name: str) -> None:
    model, inputs = family(name)
    ready = mixed(prepare(model, inputs, policy="bfloat16", device="h100"))
    found = ready.solve()
    assert 0 < found.labels.sum() < len(found.labels)
    result = Verifier(ready.captured, "bf16", "cpu", [inputs]).try_plan(found.formats)
    assert 0.6 < result.output_error / found.relative_error < 1.7
    args, kwargs = as_arguments(inputs)
    planned = apply(model, found)
    ran = planned.formats_run(*args, **kwargs)
    assert ran == {op: found.formats[op] for op in ran}
    assert sum(fmt == "bf16" for fmt in ran.values()) > 0
    have, want = planned(*args, **kwargs), copy.deepcopy(model)(*args, **kwargs)
    assert type(have) is type(want)
    for a, b in zip(leaves(have), leaves(want), strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_text_is_generated_with_a_key_value_cache_by_few_graphs(name: str) -> None:
    model, inputs = family(name)
    # In fp32, where the same tokens must come out; rounding may turn a tie of a model with random weights.
    planned = apply(model, plan(model, inputs, policy="float32"))
    prompt = inputs["input_ids"]
    want = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with planned.in_place():
        have = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(have, want)
    assert len(planned._graphs) <= 6  # with and without tokens before, and what T5 knows of its encoder's
    assert "forward" not in vars(model)


def test_the_callers_cache_is_the_one_that_grows() -> None:
    model, inputs = family("llama")
    planned = apply(model, mixed(prepare(model, inputs, policy="bfloat16", device="h100")).solve())
    cache = transformers.DynamicCache()
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        first = planned(input_ids=inputs["input_ids"], use_cache=True, **{keyword: cache})
        assert any(value is cache for value in first.values()) and cache.get_seq_length() == 12
        for length in (13, 14, 15):
            planned(input_ids=inputs["input_ids"][:, :1], use_cache=True, **{keyword: cache})
            assert cache.get_seq_length() == length
        exact = transformers.DynamicCache()
        model(input_ids=inputs["input_ids"], use_cache=True, **{keyword: exact})
    assert torch.allclose(cache.layers[0].keys[:, :, :12], exact.layers[0].keys, atol=0.02)


def test_a_feed_forward_beyond_fp16_is_fp32_and_the_rest_of_t5_is_not() -> None:
    model, inputs = family("t5")
    block = model.decoder.block[0].layer[2].DenseReluDense
    with torch.no_grad():
        block.wi.weight.mul_(1e3)
        block.wo.weight.mul_(1e2)
    ready = mixed(prepare(model, inputs, policy="float16", device="t4"))
    found = ready.solve(budget=0.05)
    products = {op.id: op for op in found.problem.graph.ops if op.name in ("linear", "matmul")}
    overflowing = {op for op, fmt in found.formats.items() if op in products and fmt == "fp32"}
    layers = {products[op].layer for op in overflowing}
    assert "decoder.block.0.layer.2.DenseReluDense.wo" in layers
    assert all(layer.startswith("decoder.block.0.layer.2") for layer in layers), layers
    assert "beyond fp16's largest" in str(found.explain("decoder.block.0.layer.2.DenseReluDense.wo"))
    args, kwargs = as_arguments(inputs)
    assert all(y.isfinite().all() for y in leaves(apply(model, found)(*args, **kwargs)))
