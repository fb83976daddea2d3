"""The config schema: each option of a run with its name, type, default and one line of help.

The YAML files in conf/ only choose values for these fields, and the command line overrides them: `optim.lr=3e-4`,
`model=llama-1b`, `experiment=llama_8b_1m`. compose.py merges them, validate.py reports values that are out of bounds or
contradict each other. Imports no torch, so planning a run and reporting a mistyped option start at once.
"""

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any, text: str, choices: tuple[Any, ...] = (), least: float | None = None, above: float | None = None
) -> Any:
    """A dataclass field with its help. validate.py enforces `choices`, `least` (≥) and `above` (>) before a run starts."""
    metadata = dict(help=text, choices=choices, least=least, above=above)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(schema: type, text: str) -> Any:
    """A dataclass field that holds a group of options."""
    return field(default_factory=schema, metadata=dict(help=text))


@dataclass
class Model:
    """The GPT's shape."""

    name: str = option("custom", "name of the model in logs and plots")
    vocabulary: int = option(0, "rows of the embedding; 0: the tokenizer's size, rounded up to a multiple of 64", least=0)
    layers: int = option(4, "number of layers, each attention and MLP", least=1)
    dim: int = option(128, "width of the residual stream", least=1)
    heads: int = option(4, "query heads per layer", least=1)
    kv_heads: int = option(4, "key/value heads per layer; heads must be a multiple of kv_heads", least=1)
    head_dim: int = option(0, "dimension of a head; 0: dim / heads", least=0)
    mlp_dim: int = option(384, "hidden width of the MLP", least=1)
    norm: str = option("rmsnorm", "normalisation layer", choices=("rmsnorm", "layernorm"))
    norm_eps: float = option(1e-5, "epsilon added to the variance in a norm", above=0)
    positions: str = option("rope", "position encoding; the group rope has the options of rope", choices=("rope", "learned"))
    max_positions: int = option(0, "rows of the learned position embedding; 0: data.length", least=0)
    activation: str = option(
        "swiglu", "MLP activation: gated SiLU, or GELU in tanh form as in GPT-2", choices=("swiglu", "gelu")
    )
    bias: bool = option(False, "biases in every linear layer except the head, as in GPT-2")
    qk_norm: bool = option(False, "RMSNorm of q and k per head before rope, as in Qwen3")
    tied: bool = option(True, "share one weight between embedding and head")
    windows: list[int] = option([], "sliding window per layer, repeated over the layers; 0: all keys, so [1024, 0] alternates")
    softcap: float = option(0.0, "caps attention scores at softcap · tanh(score / softcap); 0: off", least=0)
    logit_softcap: float = option(0.0, "the same cap for the logits of the head; 0: off", least=0)
    sinks: bool = option(False, "one learned attention sink per query head")
    dropout: float = option(0.0, "dropout rate of attention weights in training", least=0)
    init_std: float = option(
        0.02, "standard deviation of initial matrices; output projections get init_std / √(2 layers)", above=0
    )


@dataclass
class Rope:
    """Rotary position embeddings, and their scaling beyond the length of pretraining."""

    kind: str = option("base", "scaling of the frequencies", choices=("base", "linear", "ntk", "yarn", "llama3"))
    base: float = option(10_000.0, "θ; the slowest pair rotates once in about 2π · base tokens", above=1)
    factor: float = option(1.0, "length of the context as a multiple of original_length (all kinds except base)", least=1)
    original_length: int = option(8192, "context length of pretraining (yarn, llama3)", least=1)
    beta_fast: float = option(32.0, "yarn: pairs with more rotations than this over original_length stay unscaled", above=0)
    beta_slow: float = option(1.0, "yarn: pairs with fewer rotations than this are fully interpolated", above=0)
    attention_factor: float = option(0.0, "yarn: scale of cos and sin; 0: 0.1 · ln(factor) + 1", least=0)
    layers: str = option(
        "all", "layers whose frequencies are scaled; full: only those without a window, as OLMo 3", choices=("all", "full")
    )
    low_freq_factor: float = option(
        1.0, "llama3: pairs with fewer rotations than this over original_length are interpolated", above=0
    )
    high_freq_factor: float = option(4.0, "llama3: pairs with more rotations than this stay unscaled", above=0)


@dataclass
class TokenizerOptions:
    """The tokenizer."""

    kind: str = option("bytes", "kind of tokenizer; bytes needs no file", choices=("bytes", "hf", "tiktoken"))
    path: str = option("", "hf: a tokenizer.json or its folder; tiktoken: a .tiktoken file of ranks")
    begin: str = option("", "hf, tiktoken: token at the beginning of a document and of a prompt; empty: none")
    end: str = option("", "hf, tiktoken: token at the end of a document; empty: found by its usual names")


@dataclass
class Source:
    """One source of the data mixture."""

    kind: str = option(
        "stdlib",
        "stdlib: source code of Python's standard library; packages: of installed packages too, as long documents; "
        "recall, passkey, needles: synthetic tasks",
        choices=("stdlib", "packages", "text", "tokens", "recall", "passkey", "needles"),
    )
    weight: float = option(1.0, "share of the sequences, relative to the weights of the other sources", least=0)
    paths: list[str] = option([], "text: files, folders, globs or .jsonl; tokens: shards of uint16 or uint32")
    text_key: str = option("text", "text: key of a .jsonl line that holds the document")
    dtype: str = option("uint16", "tokens: integer type of the shards", choices=("uint16", "uint32"))
    end_token: int = option(-1, "tokens: id that ends a document; -1: the shards have none")
    header: int = option(0, "tokens: bytes to skip at the start of each shard (llm.c: 1024)", least=0)
    keys: int = option(8, "recall: keys per sequence, each with a fact", least=1)
    values: int = option(8, "recall: values that a key can have; chance is 1 / values", least=2)
    facts: float = option(
        0.06, "recall: share of tokens that are facts, all in the first quarter; 0: one fact per key", least=0
    )
    questions: float = option(0.25, "recall: share of tokens that are questions", above=0)
    digits: int = option(5, "passkey, needles: digits of a hidden number", least=1)
    families: list[str] = option(
        ["single", "multi_key", "multi_value", "multi_query", "variables", "two_facts"],
        "needles: families to draw from, with equal shares",
    )
    num_questions: int = option(16, "needles: questions per sequence", least=1)
    random_words: float = option(
        0.0, "needles, in training: share of a template's parts that random phrases of 1 to 16 tokens replace", least=0
    )
    seen: list[str] = option([], "needles, in evaluations: take templates, keys or both from training instead of held-out ones")


@dataclass
class Data:
    """The data of a step."""

    length: int = option(2048, "tokens per sequence, over all ranks of a ring; data.length=128k is 131072", least=2)
    batch: int = option(8, "sequences per step over all ranks and micro-batches, independent of the number of ranks", least=1)
    micro_batch: int = option(
        1, "sequences per forward of a data rank; gradients of the rest of its share are accumulated", least=1
    )
    sources: dict[str, Source] = field(
        default_factory=dict, metadata=dict(help="name: {kind: …, weight: …} of each source of the mixture")
    )
    packing: str = option(
        "stream",
        "stream: windows of one stream of documents, no padding; best_fit: windows of whole documents, few cuts, some padding",
        choices=("stream", "best_fit"),
    )
    held_out: float = option(0.05, "share of a corpus held out from training, at most 16M tokens", above=0)
    cache: str = option("~/.cache/ringspan", "cache folder for tokenized text; the first run of a corpus tokenizes it")
    verify: str = option(
        "sample",
        "check of the token cache and of shards at each start: sizes and a sample of pages, or every page",
        choices=("sample", "full"),
    )
    prefetch: int = option(2, "batches that a thread prefetches; 0: the training loop loads them itself", least=0)
    workers: int = option(0, "processes that make batches instead of the thread, for drawn tasks on fast GPUs", least=0)


@dataclass
class Parallel:
    """Parallelism: data × ring × ulysses is the number of ranks."""

    data: int = option(
        0, "data parallel replicas, each with its own sequences; 0: ranks left over by ring and ulysses", least=0
    )
    ring: int = option(
        0, "ranks of a ring, which share a sequence and exchange K/V; 0: ranks left over by data and ulysses", least=0
    )
    ulysses: int = option(1, "ranks that split the heads of a shard by all-to-all", least=1)
    layout: str = option("zigzag", "assignment of tokens to ranks", choices=("zigzag", "contiguous", "striped"))
    device: str = option("auto", "auto: the GPUs if the machine has any", choices=("auto", "cpu", "cuda"))
    attention: str = option("auto", "attention backend", choices=("auto", "reference", "chunked", "triton", "hopper"))
    timeout: float = option(600.0, "seconds that a rank waits in a collective or transfer before it fails", above=0)


@dataclass
class EngineOptions:
    """DeepSpeed, precision and the memory of a step."""

    zero: int = option(
        1, "ZeRO stage: 1 shards the optimizer state, 2 also the gradients, 3 also the weights", choices=(0, 1, 2, 3)
    )
    offload_optimizer: bool = option(False, "offload optimizer state and its step to the CPU (ZeRO 1 to 3)")
    offload_parameters: bool = option(False, "offload weights to host memory between their uses (ZeRO 3)")
    precision: str = option(
        "auto", "matmul precision: bf16 with fp32 master weights, or fp32; auto: bf16 on GPUs", choices=("auto", "bf16", "fp32")
    )
    compile: str = option(
        "auto",
        "torch.compile of layers; auto: on GPUs, with memory=none only in ZeRO 0 to 2",
        choices=("auto", "on", "off"),
    )
    memory: str = option(
        "auto",
        "what layers keep for their backward: auto is the fastest plan that fits, least the one of least memory, none keeps "
        "everything; or a plan such as 'x/4 outs=32@16 heads=1 rows=8192' (trainer/memory/plan.py)",
    )
    bucket_mb: int = option(256, "size of a gradient bucket in MiB", least=1)
    prefetch_mb: int = option(128, "ZeRO 3: MiB of weights to prefetch", least=1)


@dataclass
class Optim:
    """The optimizer."""

    kind: str = option(
        "adamw",
        "muon orthogonalises the steps of matrices and uses adamw for the rest (ZeRO 1 or 2)",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-4, "peak learning rate", above=0)
    betas: list[float] = option([0.9, 0.95], "decay rates of the two moments of adamw")
    eps: float = option(1e-8, "epsilon in the denominator of adamw", above=0)
    weight_decay: float = option(0.1, "weight decay of matrices; norms and biases have none", least=0)
    clip: float = option(1.0, "maximum gradient norm; larger gradients are scaled down; 0: off, required for muon", least=0)
    muon_lr: float = option(0.02, "peak learning rate of the matrices under muon", above=0)
    muon_momentum: float = option(0.95, "momentum of muon", least=0)


@dataclass
class Schedule:
    """The learning rate as a function of the step, without state."""

    kind: str = option(
        "cosine",
        "shape after the warmup; wsd stays at the peak until its decay phase",
        choices=("cosine", "linear", "wsd", "constant"),
    )
    warmup: int = option(-1, "warmup steps; -1: a tenth of all steps, at most 1000", least=-1)
    decay: float = option(0.2, "wsd: share of the steps, at the end, over which the rate falls", above=0)
    floor: float = option(0.1, "learning rate of the last step, as a share of the peak", least=0)


@dataclass
class Checkpoint:
    """Saving and resuming."""

    every: int = option(0, "steps between checkpoints; 0: none before the end", least=0)
    at_end: bool = option(True, "save after the last step; a stop signal always saves")
    keep_last: int = option(2, "number of newest checkpoints to keep", least=1)
    keep_every: int = option(0, "keep every checkpoint whose step is a multiple of this; 0: none", least=0)
    max_file_mib: int = option(0, "largest file in MiB, unless one tensor is larger; 0: no limit", least=0)
    resume: str = option(
        "auto",
        "auto: newest valid one in the run's folder; none: start anew; a path (excludes init_from): used if it has none",
    )
    changed: list[str] = option(
        [], "options that may differ from the checkpoint's, such as [rope,data.length,data.sources]; any other is an error"
    )


@dataclass
class Tracking:
    """Console lines, metrics.jsonl, wandb and TensorBoard."""

    log_every: int = option(10, "steps between console lines; metrics.jsonl has every step", least=1)
    wandb: str = option("disabled", "wandb mode, in addition to metrics.jsonl", choices=("disabled", "offline", "online"))
    project: str = option("ringspan", "wandb: project")
    entity: str = option("", "wandb: team or user; empty: the default of the account")
    tags: list[str] = option([], "wandb: tags")
    init_timeout: float = option(15.0, "wandb: seconds to reach the server before the run continues offline", above=0)
    tensorboard: bool = option(False, "also write TensorBoard files (pip install tensorboard)")


@dataclass
class Debug:
    """Determinism, profiles and the watchdog."""

    deterministic: bool = option(False, "bit-identical reruns: deterministic algorithms and cuBLAS workspace")
    profile: list[int] = option([], "steps to trace with torch.profiler, into the run's folder")
    memory: list[int] = option([], "steps after which a GPU memory snapshot is written (for pytorch.org/memory_viz)")
    bad_steps: int = option(5, "consecutive steps with non-finite gradients, or without labels, before the run stops", least=1)
    cut_ring: bool = option(
        False, "control: each rank attends to its own contiguous shard only, so that what another rank holds is not used"
    )
    warm_up: int = option(0, "tokens of a forward and backward before step 1, to compile and load kernels; 0: none", least=0)
    watchdog: float = option(300.0, "seconds without progress before the watchdog names the late rank; 0: off", least=0)


@dataclass
class Evaluate:
    """Evaluation on held-out data, with the same ring as training."""

    every: int = option(0, "steps between evaluations; 0: only at the end", least=0)
    batches: int = option(4, "held-out batches per evaluation; 0: no evaluation", least=0)
    bins: int = option(16, "bins of the chart of loss by position", least=1)
    sample: int = option(192, "tokens of the text sample at the end; 0: none", least=0)
    sample_every: int = option(0, "steps between text samples during the run; 0: only at the end", least=0)
    temperature: float = option(0.8, "sampling temperature of the text sample", above=0)


@dataclass
class Hardware:
    """The machine that `ringspan check` plans for, and whether a run starts that does not fit."""

    name: str = option(
        "auto", "GPU to plan for; auto measures this machine", choices=("auto", "h200", "h100", "b200", "a100", "mi300x", "cpu")
    )
    gpus: int = option(0, "number of GPUs; 0: those of this machine", least=0)
    memory_gib: float = option(0.0, "memory of a GPU in GiB; 0: that of the named GPU", least=0)
    host_gib: float = option(0.0, "host memory in GiB for offloading; 0: this machine's, or unknown for a named GPU", least=0)
    ignore_plan: bool = option(False, "start a run that is planned at more than 1.5 times the memory at hand")


@dataclass
class Config:
    """A whole run. experiment=laptop trains a small GPT on a laptop's CPU in about a minute."""

    steps: int = option(200, "optimizer steps", least=1)
    seed: int = option(0, "random seed of initial weights, data order and dropout", least=0)
    name: str = option("", "folder of the run under `runs`; empty: model, length and a hash of the options that define the run")
    runs: str = option("runs", "folder that holds the runs")
    init_from: str = option(
        "", "initial weights: a checkpoint of ours, or a folder of Hugging Face safetensors (Llama, Qwen3, GPT-2)"
    )
    model: Model = group(Model, "shape of the GPT")
    rope: Rope = group(Rope, "rotary position embeddings")
    tokenizer: TokenizerOptions = group(TokenizerOptions, "the tokenizer")
    data: Data = group(Data, "the data of a step")
    parallel: Parallel = group(Parallel, "data, ring and Ulysses parallelism")
    engine: EngineOptions = group(EngineOptions, "DeepSpeed, precision and the memory of a step")
    optim: Optim = group(Optim, "the optimizer")
    schedule: Schedule = group(Schedule, "learning rate over the steps")
    checkpoint: Checkpoint = group(Checkpoint, "saving and resuming")
    tracking: Tracking = group(Tracking, "console, JSONL, wandb, TensorBoard")
    debug: Debug = group(Debug, "determinism, profiles, watchdog")
    evaluate: Evaluate = group(Evaluate, "evaluation on held-out data")
    hardware: Hardware = group(Hardware, "machine to plan for")


DEFAULT_TOKENS = 256  # generated without tokens=


@dataclass
class Generate:
    """`ringspan generate checkpoint=… prompt=…`"""

    checkpoint: str = option("", "folder of a checkpoint, or of a run: its newest checkpoint")
    prompt: str = option("", "text to continue")
    prompt_file: str = option("", "file with the prompt, or - for standard input; only the generated text is printed")
    tokens: int = option(0, f"tokens to generate; 0: {DEFAULT_TOKENS}, or fewer if learned positions end earlier", least=0)
    temperature: float = option(0.8, "sampling temperature; 0: always the most likely token", least=0)
    top_k: int = option(0, "sample from the k most likely tokens; 0: from all", least=0)
    top_p: float = option(1.0, "sample from the smallest set of tokens with this total probability; 1: from all", above=0)
    ignore_end: bool = option(False, "continue after the token that ends a document")
    seed: int = option(0, "random seed; the same seed gives the same text", least=0)
    samples: int = option(1, "texts to generate from one prefill of the prompt, each with its own seed", least=1)
    device: str = option("auto", "auto: the GPU if the machine has one", choices=("auto", "cpu", "cuda"))


@dataclass
class Export:
    """`ringspan export checkpoint=… to=…`"""

    checkpoint: str = option("", "folder of a checkpoint, or of a run: its newest checkpoint")
    to: str = option("", "folder to write, in the format of Hugging Face")
    dtype: str = option("bf16", "dtype of the weights", choices=("bf16", "fp32"))
    max_file_mib: int = option(0, "largest file in MiB, unless one tensor is larger; 0: 4096", least=0)


@dataclass
class TrainTokenizer:
    """`ringspan tokenizer to=… size=…`"""

    to: str = option("", "folder to write, with a tokenizer.json")
    size: int = option(4096, "tokens, with 256 bytes and the end of a document", least=257)
    paths: list[str] = option([], "files, folders or globs; empty: the packages of data=packages")
