"""Every option of a run: its name, type, default and one line of help. Nothing else says what an option is.

The YAML files in conf/ only choose values for these fields, and the command line overrides them: `optim.lr=3e-4`,
`model=llama-1b`, `experiment=llama_8b_1m`. compose.py puts them together, rules.py says what contradicts what. Imports no
torch: whoever plans a run or mistypes an option need not wait for it.
"""

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any, text: str, choices: tuple[Any, ...] = (), least: float | None = None, above: float | None = None
) -> Any:
    """A field with its help; `choices`, `least` (≥) and `above` (>) are checked before anything starts."""
    metadata = dict(help=text, choices=choices, least=least, above=above)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(schema: type, text: str) -> Any:
    return field(default_factory=schema, metadata=dict(help=text))


@dataclass
class Model:
    """The GPT's shape."""

    name: str = option("custom", "what logs and plots call it")
    vocabulary: int = option(0, "rows of the embedding; 0 takes the tokenizer's size, rounded up to a multiple of 64", least=0)
    layers: int = option(4, "blocks of attention and MLP", least=1)
    dim: int = option(128, "width of the residual stream", least=1)
    heads: int = option(4, "query heads of a layer", least=1)
    kv_heads: int = option(4, "key and value heads; heads must be a multiple of it", least=1)
    head_dim: int = option(0, "numbers per head; 0 is dim / heads", least=0)
    mlp_dim: int = option(384, "width of the MLP", least=1)
    norm: str = option("rmsnorm", "kind of normalisation", choices=("rmsnorm", "layernorm"))
    norm_eps: float = option(1e-5, "added to the variance inside a norm", above=0)
    positions: str = option(
        "rope", "how tokens know their place; rope's options are in the group rope", choices=("rope", "learned")
    )
    max_positions: int = option(0, "rows of the table of learned positions; 0 is data.length", least=0)
    activation: str = option("swiglu", "the MLP: gated SiLU, or GELU (tanh form, as GPT-2)", choices=("swiglu", "gelu"))
    bias: bool = option(False, "biases in every linear layer but the head, as GPT-2 has them")
    qk_norm: bool = option(False, "RMSNorm of every head's q and k before rope, as Qwen3 has it")
    tied: bool = option(True, "the head's weight is the embedding's")
    windows: list[int] = option(
        [], "sliding window of each layer, repeated over the layers; 0 sees all, so [1024, 0] alternates"
    )
    softcap: float = option(0.0, "attention scores become softcap · tanh(score / softcap); 0 is off", least=0)
    logit_softcap: float = option(0.0, "the same for the logits of the head", least=0)
    sinks: bool = option(False, "a learned attention sink per query head")
    dropout: float = option(0.0, "rate at which attention weights are dropped while training", least=0)
    init_std: float = option(
        0.02, "standard deviation of fresh matrices; those that write to the residual stream get it / √(2 layers)", above=0
    )


@dataclass
class Rope:
    """Rotary positions, and how they stretch beyond the length they were trained at."""

    kind: str = option("base", "scaling of the frequencies", choices=("base", "linear", "ntk", "yarn", "llama3"))
    base: float = option(10_000.0, "θ: the slowest pair turns once in about 2π · base tokens", above=1)
    factor: float = option(1.0, "how many times longer than original_length the context becomes (all kinds but base)", least=1)
    original_length: int = option(8192, "the length the weights were trained at (yarn, llama3)", least=1)
    beta_fast: float = option(32.0, "yarn: pairs that turn more often than this over original_length stay as they are", above=0)
    beta_slow: float = option(1.0, "yarn: pairs that turn less often than this are fully interpolated", above=0)
    attention_factor: float = option(0.0, "yarn: scale of cos and sin; 0 is 0.1 · ln(factor) + 1", least=0)
    low_freq_factor: float = option(1.0, "llama3: below this many turns over original_length a pair is interpolated", above=0)
    high_freq_factor: float = option(4.0, "llama3: above this many turns it stays as it is", above=0)


@dataclass
class TokenizerOptions:
    """How text becomes tokens."""

    kind: str = option("bytes", "bytes needs no file", choices=("bytes", "hf", "tiktoken"))
    path: str = option("", "hf: a tokenizer.json, or its folder; tiktoken: a .tiktoken file of ranks")
    begin: str = option("", "hf, tiktoken: the token that begins a document, and a prompt; empty: none does")
    end: str = option("", "hf, tiktoken: the token that ends a document; empty finds it by its usual names")


@dataclass
class Source:
    """One part of the mixture that a run learns from."""

    kind: str = option(
        "stdlib",
        "stdlib: Python's own sources; recall, passkey: synthetic",
        choices=("stdlib", "text", "tokens", "recall", "passkey"),
    )
    weight: float = option(1.0, "its share of the sequences, in proportion to the other sources' weights", least=0)
    paths: list[str] = option([], "text: files, folders, globs or .jsonl; tokens: shards of uint16 or uint32")
    text_key: str = option("text", "text: the key of a .jsonl line that holds the document")
    dtype: str = option("uint16", "tokens: the type of the shards' numbers", choices=("uint16", "uint32"))
    end_token: int = option(-1, "tokens: the id that ends a document; -1: the shards have none")
    header: int = option(0, "tokens: bytes to skip at the head of each shard (llm.c's have 1024)", least=0)
    keys: int = option(8, "recall: keys in a sequence, about each of which there is a fact", least=1)
    values: int = option(8, "recall: values that a key can have, so chance is one in so many", least=2)
    facts: float = option(0.06, "recall: share of the tokens that tell a fact, in the first quarter; 0: each once", least=0)
    questions: float = option(0.25, "recall: share of the tokens that ask for a fact", above=0)
    digits: int = option(5, "passkey: digits of the number to be found again", least=1)


@dataclass
class Data:
    """What a step sees."""

    length: int = option(2048, "tokens in a sequence, over all ranks of a ring; data.length=128k is 131072", least=2)
    batch: int = option(8, "sequences in a step, over all ranks and micro-batches: the same at any number of ranks", least=1)
    micro_batch: int = option(1, "sequences that a data rank runs at once; the rest of its share is accumulated", least=1)
    sources: dict[str, Source] = field(
        default_factory=dict, metadata=dict(help="name: {kind: …, weight: …} of each part of the mixture")
    )
    held_out: float = option(0.05, "share of a corpus that training never sees, at most 16M tokens", above=0)
    cache: str = option("~/.cache/ringspan", "folder for tokenized text, so that only the first run of a corpus tokenizes it")
    prefetch: int = option(2, "batches that a thread prepares ahead; 0 prepares them in the loop", least=0)


@dataclass
class Parallel:
    """How ranks share the work: data × ring × ulysses is the number of ranks."""

    data: int = option(0, "replicas, each with sequences of its own; 0: what ring and ulysses leave", least=0)
    ring: int = option(
        0, "ranks that a sequence is spread over, K/V travelling round; 0: what data and ulysses leave, all by default", least=0
    )
    ulysses: int = option(1, "ranks that share the heads of a shard by all-to-all", least=1)
    layout: str = option("zigzag", "who owns which tokens of a sequence", choices=("zigzag", "contiguous", "striped"))
    device: str = option("auto", "auto takes the GPUs if there are any", choices=("auto", "cpu", "cuda"))
    attention: str = option("auto", "attention's backend", choices=("auto", "reference", "chunked", "triton", "hopper"))
    timeout: float = option(600.0, "seconds that a rank waits for the others before it gives up", above=0)


@dataclass
class EngineOptions:
    """DeepSpeed and the memory of a step."""

    zero: int = option(1, "ZeRO stage: 1 shards the optimizer, 2 the gradients too, 3 the weights too", choices=(0, 1, 2, 3))
    offload_optimizer: bool = option(False, "optimizer state and its step live on the CPU (ZeRO 1 to 3)")
    offload_parameters: bool = option(False, "weights live on the CPU between their uses (ZeRO 3)")
    precision: str = option(
        "auto", "of products: bf16 over fp32 master weights, or fp32; auto: bf16 on GPUs", choices=("auto", "bf16", "fp32")
    )
    compile: str = option("auto", "torch.compile of each block; auto: on GPUs with ZeRO 0 to 2", choices=("auto", "on", "off"))
    activations: str = option(
        "attention",
        "what a block keeps for the backward: none recomputes nothing, full recomputes all, attention all but its (out, lse)",
        choices=("none", "full", "attention"),
    )
    offload_activations: bool = option(False, "what a checkpointed block keeps of its input waits in the CPU's memory")
    bucket_mb: int = option(256, "MiB of gradients that travel together", least=1)
    prefetch_mb: int = option(128, "ZeRO 3: MiB of weights fetched ahead of their use", least=1)


@dataclass
class Optim:
    kind: str = option(
        "adamw", "muon orthogonalises matrices' steps and leaves the rest to adamw (ZeRO 1 or 2)", choices=("adamw", "muon")
    )
    lr: float = option(3e-4, "highest learning rate", above=0)
    betas: list[float] = option([0.9, 0.95], "decay of adamw's two averages")
    eps: float = option(1e-8, "added to adamw's denominator", above=0)
    weight_decay: float = option(0.1, "of matrices; norms and biases have none", least=0)
    clip: float = option(1.0, "largest norm of the gradient that a step follows as it is; 0 is off, as for muon", least=0)
    muon_lr: float = option(0.02, "learning rate of the matrices that muon steps", above=0)
    muon_momentum: float = option(0.95, "muon's momentum", least=0)


@dataclass
class Schedule:
    """The learning rate is a function of the step: nothing to lose."""

    kind: str = option(
        "cosine",
        "shape after the warmup; wsd stays at the peak until its decay",
        choices=("cosine", "linear", "wsd", "constant"),
    )
    warmup: int = option(-1, "steps up to the peak; -1: a tenth of all, at most 1000", least=-1)
    decay: float = option(0.2, "wsd: the last share of the steps, over which the rate falls", above=0)
    floor: float = option(0.1, "the last step's rate, as a share of the peak", least=0)


@dataclass
class Checkpoint:
    every: int = option(0, "steps between checkpoints; 0: none in between", least=0)
    at_end: bool = option(True, "save after the last step; a signal always saves")
    keep_last: int = option(2, "how many of the newest stay", least=1)
    keep_every: int = option(0, "a checkpoint whose step is a multiple of this stays for ever; 0: none", least=0)
    resume: str = option(
        "auto",
        "auto: the newest valid one in the run's folder; none: start afresh; "
        "or a path to one, while the folder has none, in place of init_from",
    )


@dataclass
class Tracking:
    log_every: int = option(10, "steps between lines on the console; the JSONL has every step", least=1)
    wandb: str = option("disabled", "where the curves go besides metrics.jsonl", choices=("disabled", "offline", "online"))
    project: str = option("ringspan", "wandb: project")
    entity: str = option("", "wandb: team or user; empty: the account's default")
    tags: list[str] = option([], "wandb: tags")
    init_timeout: float = option(15.0, "wandb: seconds to reach the server before the run goes on offline", above=0)
    tensorboard: bool = option(False, "write TensorBoard's files too (pip install tensorboard)")


@dataclass
class Debug:
    deterministic: bool = option(False, "bit-equal reruns: deterministic algorithms and cuBLAS workspace")
    profile: list[int] = option([], "steps that torch.profiler traces; the trace lies in the run's folder")
    memory: list[int] = option([], "steps after which the GPU's memory is written out (for pytorch.org/memory_viz)")
    bad_steps: int = option(5, "steps in a row with gradients that are not finite before the run stops", least=1)
    watchdog: float = option(300.0, "seconds without progress before the watchdog says which rank is behind; 0 is off", least=0)


@dataclass
class Evaluate:
    """What is measured on held-out data, under the same ring."""

    every: int = option(0, "steps between evaluations; 0: only at the end", least=0)
    batches: int = option(4, "batches of the held-out data each time; 0: nothing is evaluated", least=0)
    bins: int = option(16, "bars that loss by position is drawn in", least=1)
    sample: int = option(192, "tokens of the sample at the end; 0 is none", least=0)
    temperature: float = option(0.8, "of the sample", above=0)


@dataclass
class Hardware:
    """The machine that `ringspan check` plans for."""

    name: str = option("auto", "auto measures this machine", choices=("auto", "h200", "h100", "b200", "a100", "mi300x", "cpu"))
    gpus: int = option(0, "how many; 0: those of this machine", least=0)
    memory_gib: float = option(0.0, "memory of one; 0: what the named one has", least=0)
    host_gib: float = option(0.0, "memory of a host, for what is offloaded; 0: this machine's, of a named one unknown", least=0)


@dataclass
class Config:
    """A whole run. experiment=laptop trains a small GPT on a laptop's CPU in about a minute."""

    steps: int = option(200, "steps of the optimizer", least=1)
    seed: int = option(0, "fixes weights, the order of the data and dropout", least=0)
    name: str = option("", "the run's folder under `runs`; empty: model, length and a hash of what makes the run what it is")
    runs: str = option("runs", "the folder for runs")
    init_from: str = option("", "weights to start from: a folder with Hugging Face safetensors (Llama, Qwen3, GPT-2)")
    model: Model = group(Model, "the GPT's shape")
    rope: Rope = group(Rope, "rotary positions")
    tokenizer: TokenizerOptions = group(TokenizerOptions, "how text becomes tokens")
    data: Data = group(Data, "what a step sees")
    parallel: Parallel = group(Parallel, "how ranks share the work")
    engine: EngineOptions = group(EngineOptions, "DeepSpeed and the memory of a step")
    optim: Optim = group(Optim, "the optimizer")
    schedule: Schedule = group(Schedule, "the learning rate over the steps")
    checkpoint: Checkpoint = group(Checkpoint, "what is saved, kept and resumed")
    tracking: Tracking = group(Tracking, "console, JSONL, wandb, TensorBoard")
    debug: Debug = group(Debug, "determinism, profiles, watchdog")
    evaluate: Evaluate = group(Evaluate, "held-out data")
    hardware: Hardware = group(Hardware, "the machine to plan for")


USUAL_TOKENS = 256  # that generation adds if it is not told how many


@dataclass
class Generate:
    """`ringspan generate checkpoint=… prompt=…`"""

    checkpoint: str = option("", "a checkpoint's folder, or a run's: then its newest")
    prompt: str = option("", "the text to go on with")
    prompt_file: str = option("", "or a file that holds it, - for standard input; then only what is added is printed")
    tokens: int = option(0, f"how many to add; 0: {USUAL_TOKENS}, or what learned positions have room for", least=0)
    temperature: float = option(0.8, "0 always takes the likeliest", least=0)
    top_k: int = option(0, "draw from the k likeliest tokens; 0: from all", least=0)
    top_p: float = option(1.0, "draw from the fewest tokens that together are so likely; 1: from all", above=0)
    ignore_end: bool = option(False, "go on behind the token that ends a document")
    seed: int = option(0, "the same seed gives the same text", least=0)
    samples: int = option(1, "texts that go on from the prompt, which is read once; each has a seed of its own", least=1)
    device: str = option("auto", "auto takes the GPU if there is one", choices=("auto", "cpu", "cuda"))


@dataclass
class Export:
    """`ringspan export checkpoint=… to=…`"""

    checkpoint: str = option("", "a checkpoint's folder, or a run's: then its newest")
    to: str = option("", "the folder to write, in Hugging Face's format")
    dtype: str = option("bf16", "of the numbers in it", choices=("bf16", "fp32"))
