"""Train a small Mistral of transformers on packed sequences, on one device: the script that hf_ring.patch puts onto a ring.

    python docs/examples/hf_script.py
    git apply docs/examples/hf_ring.patch && torchrun --nproc-per-node=2 docs/examples/hf_script.py

The weights are random and the text is a file of transformers, so nothing is downloaded.
"""

from pathlib import Path

import torch
import transformers
from torch.nn import functional as F

STEPS, LENGTH, ACCUMULATE = 12, 301, 2
SHAPE = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def make_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=64)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Packed documents of uneven lengths: positions restart, and a document's first token is not predicted."""
    text = torch.tensor(list(Path(transformers.__file__).read_bytes()) * 8)
    batches = []
    for start in range(0, STEPS * ACCUMULATE * LENGTH, LENGTH):
        ids, lengths = text[start : start + LENGTH], [17 + start % 100, 1, 283 - start % 100]
        positions = torch.cat([torch.arange(n) for n in lengths])
        batches.append(dict(input_ids=ids[None], position_ids=positions[None], labels=ids.where(positions > 0, -100)[None]))
    return batches


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = make_batches()
    for step in range(STEPS):
        micro_batches = batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**batch, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {total:.9f}", flush=True)


if __name__ == "__main__":
    main()
