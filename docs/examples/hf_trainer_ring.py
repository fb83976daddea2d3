"""transformers' Trainer on a ring: packed documents, a tiny random Mistral with a window, nothing downloaded.

    python docs/examples/hf_trainer_ring.py                            starts two gloo ranks of itself
    torchrun --nproc-per-node=4 docs/examples/hf_trainer_ring.py       or runs as ranks that you start
    python docs/examples/hf_trainer_ring.py --one-rank                 the plain Trainer, for comparison

Every rank of the ring reads the same batches. A batch is one row of packed documents, whose tokens the ranks share. Losses and
weights are those of the plain Trainer.
"""

import os
import sys
import tempfile

import torch
import transformers
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ringspan import Mesh
from ringspan.hf import TrainerMixin, context_parallel, register

STEPS = 10


class RingTrainer(TrainerMixin, Trainer):
    pass


def make_documents(count: int) -> list[dict[str, list[int]]]:
    """Documents of uneven lengths. Each repeats one of three phrases, which a model can learn."""
    phrases = torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(0)).tolist()
    documents = []
    for index in range(count):
        ids = (phrases[index % 3] * 30)[: 5 + 37 * index % 200]
        documents.append(dict(input_ids=ids, labels=ids))
    return documents


def main(one_rank: bool) -> None:
    register()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=48, use_cache=False,
    )  # fmt: skip
    attention = "sdpa" if one_rank else "ringspan"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, log_level="error",
        )  # fmt: skip
        data = dict(train_dataset=make_documents(80), data_collator=DataCollatorWithFlattening())
        if one_rank:
            trainer = Trainer(model, args, **data)
        else:
            ring = context_parallel(Mesh(ring=torch.distributed.get_world_size()))
            trainer = RingTrainer(model, args, ring=ring, **data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if args.process_index == 0:
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']}: loss {entry['loss']:.9f}")


if __name__ == "__main__":
    if "RANK" not in os.environ and "--one-rank" not in sys.argv:  # started without torchrun
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [*torchrun, __file__])
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    main("--one-rank" in sys.argv)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
