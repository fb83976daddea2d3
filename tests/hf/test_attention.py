"""Layers on one device: generation with a cache, padding, packing by offsets, dropout, and what a layer may not ask for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    MptConfig,
    PretrainedConfig,
    ViTConfig,
    ViTModel,
)

from ringspan.hf.attention import layer_attention
from ringspan.hf.masks import LayerMask, MaskRules
from tests.hf.models import CONFIGS, inputs_of, make_batch, make_model, valid_rows

CAUSAL = MaskRules(causal=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_equals_eager(name: str) -> None:
    """Left-padded prompts longer and shorter than a window, with a cache, greedy."""
    batch = make_batch("left", length=14)
    options = dict(max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True, eos_token_id=None)
    prompts = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    expected, actual = (make_model(name, a, torch.float32).generate(**prompts, **options) for a in ("eager", "ringspan"))
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=4), "attention_mask.add"),
        (MptConfig(vocab_size=64, d_model=64, n_layers=1, n_heads=4), "attention_mask.to"),
    ],
    ids=["bloom", "mpt"],
)
def test_a_model_with_a_bias_of_its_own_is_refused(config: PretrainedConfig, message: str) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
    with pytest.raises(ValueError, match=f"{message}: the model computes with its mask .* use attn_implementation='eager'"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_a_static_cache_is_refused() -> None:
    batch = make_batch("plain", length=14)
    with pytest.raises(
        ValueError, match="cache of model 'llama': a static or unfilled cache is not supported; DynamicCache works"
    ):
        make_model("llama", "ringspan").generate(batch["input_ids"], max_new_tokens=2, cache_implementation="static")


def test_offsets_of_packed_sequences() -> None:
    """What DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes; documents of length 0 and 1."""
    batch, model = make_batch("packed"), make_model("mistral", "ringspan")
    one = {name: x[:1] for name, x in batch.items() if name != "labels"}
    starts = (one["position_ids"][0] == 0).nonzero().flatten()
    offsets = torch.cat([starts, starts[-1:], torch.tensor([one["input_ids"].shape[1]])]).int()  # the last but one is empty
    packing = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets.clone(), max_length_q=20, max_length_k=20)
    expected = make_model("mistral", "oracle")(**one, use_cache=False).logits
    torch.testing.assert_close(model(**one, **packing).logits, expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(
        ValueError, match=r"MistralAttention 0 of model 'mistral': position_ids at the starts of documents are \[\[0, 1, 21"
    ):
        model(one["input_ids"], **packing)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be an int32 tensor, not list"):
        model(**one, cu_seq_lens_q=offsets.tolist())
    with pytest.raises(ValueError, match=r"cu_seq_lens_q=.* does not describe 37 tokens"):
        model(**one, cu_seq_lens_q=offsets[:-1])
    with pytest.raises(ValueError, match=r"cu_seq_lens_k of .* differ from cu_seq_lens_q"):
        model(**one, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets - 1)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q with an attention_mask"):
        model(**one, cu_seq_lens_q=offsets, attention_mask=torch.ones_like(one["input_ids"]))


def test_positions_that_restart_separate_documents_with_a_cache_too() -> None:
    """transformers' eager attention then lets documents see each other."""
    batch = make_batch("packed")
    model, ids, positions = make_model("llama", "ringspan"), batch["input_ids"], batch["position_ids"]
    logits = [model(ids, position_ids=positions, use_cache=use_cache).logits for use_cache in (True, False)]
    assert torch.equal(*logits)
    alone = model(ids[1:, -9:]).logits
    torch.testing.assert_close(logits[0][1:, -9:], alone, rtol=1e-11, atol=1e-11)


def test_dropout_is_recomputed_alike() -> None:
    batch, gradients = make_batch("left"), []
    for checkpointing in (False, True):
        model = make_model("llama", "ringspan", attention_dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        torch.manual_seed(5)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        logits[valid_rows(batch)].square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients) and float(gradients[0].abs().max()) > 0


def test_an_encoder_without_a_mask_attends_to_everything() -> None:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4
    )
    outputs = []
    for attention in ("eager", "ringspan"):
        torch.manual_seed(0)
        model = ViTModel._from_config(config, attn_implementation=attention).eval()
        outputs.append(model(torch.randn(1, 3, 16, 16)).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_equals_eager_on_one_device() -> None:
    """Padding of the encoder is not seen by cross-attention, with a cache."""
    shape = dict(d_model=32, vocab_size=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = BartConfig(**shape, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64)
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[0, 6:] = 0
    outputs = []
    for attention in ("eager", "ringspan"):
        torch.manual_seed(0)
        model = BartForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
        outputs.append(model(ids, attention_mask=padding, decoder_input_ids=ids[:, :5]).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def call(mask: Any = None, keys: int = 8, causal: bool = True, width: int = 16, **options: Any) -> None:
    module = SimpleNamespace(is_causal=causal, layer_idx=3, config=SimpleNamespace(model_type="toy"))
    q, k = torch.randn(1, 2, 8, width), torch.randn(1, 2, keys, width)
    mask = LayerMask(CAUSAL, 8, 8, None, None) if mask is None else mask
    layer_attention(module, q, k, k, None if mask == "none" else mask, **options)  # type: ignore[arg-type]


HERE = "SimpleNamespace 3 of model 'toy'"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("attention bias", dict(position_bias=torch.zeros(1, 2, 8, 8)), f"position_bias=a tensor .* of {HERE}: not supported"),
    ("head mask", dict(head_mask=torch.ones(2)), f"head_mask=a tensor .* of {HERE}: not supported"),
    (
        "output_attentions",
        dict(output_attentions=True),
        f"output_attentions=True of {HERE}: attention weights are never stored",
    ),
    ("unknown option", dict(temperature=0.5), f"temperature=0.5 of {HERE}: not supported"),
    ("matrix", dict(mask=torch.zeros(1, 1, 8, 8)), rf"attention_mask=\(1, 1, 8, 8\) of {HERE}: a matrix is not supported"),
    ("no mask", dict(mask="none"), f"attention_mask=None of {HERE}, which is causal"),
    (
        "no mask, window",
        dict(mask="none", causal=False, sliding_window=4),
        f"attention_mask=None of {HERE}, which is causal or has",
    ),
    ("other keys", dict(keys=12), f"attention_mask of {HERE} is for 8 queries and 8 keys, the layer has 8 and 12"),
    ("is_causal", dict(is_causal=False), f"is_causal=False of {HERE}, but its mask is causal"),
    ("window", dict(sliding_window=4), f"sliding_window=4 of {HERE}, but its mask has window=None"),
    ("head dim", dict(width=12), "q and k have head dim 12: 16 to 256 in steps of 8 work"),
    ("dropout", dict(dropout=1.5), r"dropout=1.5 must be in \[0, 1\)"),
]


@pytest.mark.parametrize(("options", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_an_option_that_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    call()
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_a_model_refuses_a_matrix() -> None:
    batch = make_batch("plain")
    with pytest.raises(ValueError, match=r"a matrix is not supported; pass attention_mask .B, S. of 0 and 1"):
        make_model("llama", "ringspan")(batch["input_ids"], attention_mask=torch.zeros(2, 1, 37, 37, dtype=torch.float64))


def test_a_compiled_model_equals_an_eager_one() -> None:
    model = make_model("llama", "ringspan", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for kind, seed in (("packed", 0), ("left", 1)):
        inputs = inputs_of(make_batch(kind, seed))
        assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
