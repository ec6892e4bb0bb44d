"""LoRA adapters of PEFT on a frozen 16-bit model: they learn in every mode, are saved, and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.torch import Amp

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def adapted(dtype: torch.dtype, wide: bool) -> Any:
    """A 16-bit model with adapters in float32, as PEFT makes them, or in the model's format."""
    model = llama(dtype)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=wide)


def ids() -> torch.Tensor:
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(2))


def trained(model: Any, fmt: str, weights: str) -> tuple[list[float], Amp]:
    adapters = [p for p in model.parameters() if p.requires_grad]
    amp = Amp(model, torch.optim.AdamW(adapters, 3e-2), fmt, weights=weights)
    losses = []
    for _ in range(20):
        with amp:
            loss = model(input_ids=ids(), labels=ids()).loss
        assert amp.step(loss, clip_norm=1.0).stepped
        losses.append(loss.item())
    return losses, amp


@pytest.mark.parametrize(
    ("fmt", "weights"),
    [
        ("bfloat16", "master"),
        ("bfloat16", "split"),
        ("bfloat16", "kahan"),
        ("bfloat16", "stochastic"),
        ("float16", "master"),
    ],
)
def test_adapters_learn_in_every_mode_what_float32_adapters_learn(fmt: str, weights: str) -> None:
    dtype = FORMATS[fmt]
    expected, _ = trained(adapted(dtype, wide=True), fmt, "auto")
    model = adapted(dtype, wide=False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    found, amp = trained(model, fmt, weights)
    assert expected[-1] < expected[0] - 0.2
    assert found[-1] == pytest.approx(expected[-1], abs=0.1 * (expected[0] - expected[-1]))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert {kept.low.dtype for kept in amp._wide.kept} == {dtype}
    assert len(amp._wide.kept) == sum(p.requires_grad for p in model.parameters())  # nothing of the base is kept


@pytest.mark.parametrize("wide", [True, False])
def test_trained_adapters_are_saved_loaded_and_merged(tmp_path: Path, wide: bool) -> None:
    model = adapted(torch.bfloat16, wide)
    trained(model, "bfloat16", "auto")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(torch.bfloat16), tmp_path, autocast_adapter_dtype=wide)
    with torch.no_grad():
        before, expected = llama(torch.bfloat16)(ids()).logits, model(ids()).logits
        assert torch.equal(loaded(ids()).logits, expected)
        merged = loaded.merge_and_unload()(ids()).logits
    learnt = (expected - before).float().norm()
    assert (merged - expected).float().norm() < 0.1 * learnt  # one rounding of the sum of weights
