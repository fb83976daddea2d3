"""Generation and export: the KV cache, sampling options, restored checkpoints, the commands and their errors."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringspan.trainer import generate as generating
from ringspan.trainer.checkpoint import huggingface, load_model, safetensors
from ringspan.trainer.config.schema import DEFAULT_TOKENS, Model, Rope, TokenizerOptions
from ringspan.trainer.data.tokenizer import Bytes
from ringspan.trainer.export import main as export_main
from ringspan.trainer.generate import default_num_tokens, draw, generate, generate_texts, main
from ringspan.trainer.model import GPT
from tests.trainer import faults

SHAPE = Model(vocabulary=320, layers=3, dim=32, heads=4, kv_heads=2, head_dim=16, mlp_dim=48, init_std=0.3)
GPT2 = dict(norm="layernorm", positions="learned", max_positions=64, activation="gelu", bias=True, kv_heads=4)
VARIANTS = [{}, dict(windows=[4, 0, 7]), dict(sinks=True, qk_norm=True, softcap=5.0)]
PROMPT = [1, 5, 9, 20, 7]


@pytest.mark.parametrize("changes", VARIANTS)
def test_cached_generation_equals_recomputing_all_tokens(changes: dict) -> None:
    model = GPT(dataclasses.replace(SHAPE, **changes)).double()
    output = generate(model, PROMPT, 20, temperature=0)
    text = list(PROMPT)
    for _ in range(20):
        logits = model.logits(torch.tensor([text]), torch.arange(len(text))[None])
        text.append(int(logits[0, -1].argmax()))
    assert output == text[len(PROMPT) :] and len(set(output)) > 3


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("prompt_tokens", [2**14, 3])
def test_texts_of_a_batch_equal_texts_generated_alone(
    changes: dict, prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the prompt's pages, one ends before the others, and the prompt may run in chunks."""
    model = GPT(dataclasses.replace(SHAPE, **changes)).double()
    alone = [generate(model, PROMPT, 70, seed=seed) for seed in (5, 6, 7)]
    stop = alone[1][20]
    alone = [text[: text.index(stop)] if stop in text else text for text in alone]
    monkeypatch.setattr(generating, "PROMPT_TOKENS", prompt_tokens)
    reported: list[list[int]] = [[], [], []]
    texts = generate_texts(model, PROMPT, 70, 3, seed=5, stop={stop}, each=lambda text, token: reported[text].append(token))
    assert texts == alone == reported and len({len(text) for text in texts}) > 1
    assert generate_texts(model, PROMPT, 0, 2) == [[], []]


def test_seed_determines_the_text() -> None:
    model = GPT(SHAPE)
    samples = [generate(model, PROMPT, 30, seed=seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2] and len(samples[0]) == 30


def test_stop_token_ends_the_text_and_each_token_is_reported() -> None:
    model, reported = GPT(SHAPE), []
    full = generate(model, PROMPT, 30, seed=0)
    end = full[10]
    assert generate(model, PROMPT, 30, seed=0, stop={end}, each=reported.append) == full[: full.index(end)] == reported


def test_ids_of_padding_rows_are_never_drawn() -> None:
    model = GPT(SHAPE)
    with torch.no_grad():
        model.embedding.weight[257:] *= 50  # the padding rows of the vocabulary, with large logits
    assert max(generate(model, PROMPT, 200, temperature=2.0, size=257)) < 257
    assert max(generate(model, PROMPT, 200, temperature=2.0)) >= 257


def test_draws_follow_top_k_top_p_and_temperature() -> None:
    weights = torch.tensor([0.05, 0.5, 0.3, 0.15])
    generator = torch.Generator().manual_seed(0)

    def shares(**options) -> list[float]:
        options = dict(temperature=1.0, top_k=0, top_p=1.0) | options
        drawn = torch.tensor([draw(weights.log(), generator=generator, **options) for _ in range(4000)])
        return (torch.bincount(drawn, minlength=4) / 4000).tolist()

    assert shares() == pytest.approx(weights.tolist(), abs=0.03)
    assert shares(top_k=2) == pytest.approx([0, 0.625, 0.375, 0], abs=0.03)
    assert shares(top_p=0.7) == pytest.approx([0, 0.625, 0.375, 0], abs=0.03)
    assert shares(top_p=0.4) == [0, 1, 0, 0] == shares(temperature=0.0) == shares(top_k=1)
    hot = weights**0.5 / (weights**0.5).sum()
    assert shares(temperature=2.0) == pytest.approx(hot.tolist(), abs=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(temperature=-1.0), "temperature=-1"),
        (dict(top_p=0.0), "top_p=0"),
        (dict(num_tokens=60), "this model has learned 64 positions"),
        (dict(prompt=[5, 400]), "the id 400, and model.vocabulary=320"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict, message: str) -> None:
    model = GPT(dataclasses.replace(SHAPE, **GPT2))
    with pytest.raises(ValueError, match=message):
        generate(**(dict(model=model, prompt=PROMPT, num_tokens=4) | options))


def save(folder: Path, model: GPT, options: TokenizerOptions | None = None, step: int = 12, **extra: bool) -> Path:
    """Write a checkpoint with the files that generation reads."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    safetensors.write(path / "weights.safetensors", {name: weight.detach() for name, weight in model.named_parameters()})
    described = dict(model=vars(model.config), rope=vars(model.rope), tokenizer=vars(options or TokenizerOptions()), length=128)
    (path / "state.json").write_text(json.dumps(dict(model=described | extra)))
    faults.seal(path)
    return path


@pytest.mark.parametrize("changes", [dict(tied=True), dict(tied=False), GPT2])
def test_checkpoint_restores_the_model(tmp_path: Path, changes: dict) -> None:
    model = GPT(dataclasses.replace(SHAPE, **changes), Rope(base=500.0))
    step = save(tmp_path, model)
    (tmp_path / "checkpoints" / "step-00000090.tmp").mkdir()  # still being written
    (tmp_path / "checkpoints" / "step-00000080").mkdir()  # without a manifest
    for path in (tmp_path, tmp_path / "checkpoints", step):
        restored = load_model.RestoredModel(str(path))
        assert restored.folder == step and restored.length == 128
    built = restored.build(torch.device("cpu"), torch.float32)
    assert (built.head.weight is built.embedding.weight) == model.config.tied
    tokens = torch.tensor([PROMPT])
    assert torch.equal(built.logits(tokens, torch.arange(5)[None]), model.logits(tokens, torch.arange(5)[None]))
    with pytest.raises(ValueError, match=r"checkpoint='nowhere' is no checkpoint"):
        load_model.find_checkpoint("nowhere")


def test_command_prints_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(SHAPE)
    save(tmp_path, model)
    arguments = [f"checkpoint={tmp_path}", "prompt=def f", "tokens=20", "temperature=0", "device=cpu", "ignore_end=true"]
    main(arguments)
    out = capsys.readouterr().out
    ids = generate(model, list(b"def f"), 20, temperature=0, size=257)
    expected = bytes(i for i in [*b"def f", *ids] if i < 256).decode(errors="replace")
    assert out == expected + "\n"
    errors = [(["checkpoint=nowhere", "prompt=a"], "is no checkpoint")]
    if not torch.cuda.is_available():
        errors.append(([f"checkpoint={tmp_path}", "prompt=a", "device=cuda"], "torch finds no GPU; take auto or cpu"))
    for arguments, message in errors:
        assert message in error_of(main, arguments, capsys)


def test_command_prints_several_texts_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(SHAPE)
    save(tmp_path, model)
    main([f"checkpoint={tmp_path}", "prompt=def f", "tokens=20", "device=cpu", "ignore_end=true", "samples=2", "seed=4"])
    expected = ""
    for seed in (4, 5):
        ids = generate(model, list(b"def f"), 20, seed=seed, size=257)
        text = bytes(i for i in [*b"def f", *ids] if i < 256).decode(errors="replace")
        expected += f"--- seed={seed}\n{text}\n"
    assert capsys.readouterr().out == expected


def test_prompt_begins_with_the_tokenizers_begin_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BytesWithBegin(Bytes):
        size, begin = 258, (257,)

    monkeypatch.setattr(load_model.RestoredModel, "tokenizer", lambda self: BytesWithBegin())
    model = GPT(SHAPE)
    save(tmp_path, model)
    for prompt in ("def f", ""):
        main([f"checkpoint={tmp_path}", f"prompt={prompt}", "tokens=20", "temperature=0", "device=cpu", "ignore_end=true"])
        ids = generate(model, [257, *prompt.encode()], 20, temperature=0, size=258)
        assert capsys.readouterr().out == BytesWithBegin().decode([*prompt.encode(), *ids]) + "\n"


def test_prompt_from_a_file_and_from_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, GPT(SHAPE))
    (tmp_path / "book.txt").write_bytes(b"def f")
    options = [f"checkpoint={tmp_path}", "tokens=20", "temperature=0", "device=cpu", "ignore_end=true"]
    main([*options, "prompt=def f"])
    expected = capsys.readouterr().out
    main([*options, f"prompt_file={tmp_path / 'book.txt'}"])
    assert "def f" + capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f")))
    main([*options, "prompt_file=-"])
    assert "def f" + capsys.readouterr().out == expected
    for prompt, message in (
        (["prompt_file=none.txt"], "prompt_file='none.txt' cannot be read: No such file"),
        (["prompt_file=-", "prompt=a"], "set one of them"),
    ):
        assert message in error_of(main, [*options, *prompt], capsys)


def test_export_writes_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(SHAPE, Rope(base=500.0))
    save(tmp_path, model)
    export_main([f"checkpoint={tmp_path}", f"to={tmp_path / 'hf'}", "dtype=fp32"])
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    family, shape, rope = huggingface.read_config(tmp_path / "hf")
    assert (family, rope.base) == ("llama", 500.0)
    read = huggingface.weight_reader(tmp_path / "hf", shape, rope)
    for name, weight in model.named_parameters():
        assert torch.equal(read(name, "weight", 0, weight.numel()), weight.detach().flatten())


def test_export_copies_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("rules")
    save(tmp_path, GPT(SHAPE), TokenizerOptions("hf", str(tmp_path)))
    monkeypatch.setattr(load_model.RestoredModel, "tokenizer", lambda self: Bytes())  # needs no library
    monkeypatch.setenv("HOME", str(tmp_path))
    export_main([f"checkpoint={tmp_path}", "to=~/hf"])
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "rules"


def test_export_replaces_the_weights_of_an_earlier_one(tmp_path: Path) -> None:
    save(tmp_path, GPT(SHAPE), TokenizerOptions())
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).write_text("of an earlier export")
    export_main([f"checkpoint={tmp_path}", f"to={folder}"])
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]


def error_of(command: Callable[[list[str]], None], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error text of a command that exits with code 2."""
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_token_shards_without_a_tokenizer_have_no_prompt_and_no_end_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tokens, end in (("shards", True, None), ("text", False, 256)):
        save(tmp_path / name, GPT(SHAPE), tokens=tokens)
        export_main([f"checkpoint={tmp_path / name}", f"to={tmp_path / name / 'hf'}"])
        written = json.loads((tmp_path / name / "hf" / "config.json").read_text())
        assert written["eos_token_id"] == end  # null: transformers fills in the family's default for a missing key
    error = error_of(main, [f"checkpoint={tmp_path / 'shards'}", "prompt=a", "device=cpu"], capsys)
    assert "tokenizer.kind=hf tokenizer.path=" in error
    main([f"checkpoint={tmp_path / 'text'}", "prompt=a", "tokens=1", "device=cpu"])


def test_learned_positions_limit_the_default_number_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(dataclasses.replace(SHAPE, **GPT2))
    save(tmp_path, model)
    assert [default_num_tokens(model.config, num) for num in (5, 63, 64)] == [59, 1, 1]
    assert default_num_tokens(SHAPE, 5000) == DEFAULT_TOKENS
    arguments = [f"checkpoint={tmp_path}", "prompt=def f", "temperature=0", "device=cpu", "ignore_end=true"]
    main([*arguments, "tokens=59"])
    expected = capsys.readouterr().out
    main(arguments)
    assert capsys.readouterr().out == expected
    assert "tokens=60 after a prompt of 5" in error_of(main, [*arguments, "tokens=60"], capsys)
    long = [arguments[0], f"prompt={'a' * 64}", *arguments[2:]]
    assert "this model has learned 64 positions; ask for fewer tokens, or use a shorter prompt" in error_of(main, long, capsys)


@pytest.mark.parametrize(
    ("name", "message"), [("state.json", "is damaged: state.json is not readable: "), ("weights.safetensors", "is cut short")]
)
def test_error_of_a_damaged_checkpoint_names_the_previous_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    def cut(step: Path) -> None:
        data = (step / name).read_bytes()
        (step / name).write_bytes(data[: len(data) // 2])

    model = GPT(SHAPE)
    first, second, third = (save(tmp_path, model, step=step) for step in (8, 9, 10))
    (tmp_path / "checkpoints" / "step-00000007.bad").mkdir()
    cut(third)
    arguments = [f"checkpoint={tmp_path}", "prompt=a", "device=cpu"]
    error = error_of(main, arguments, capsys)
    assert str(third) in error and message in error and f"checkpoint={second} is the one before" in error
    cut(second)
    assert f"checkpoint={first} is the one before" in error_of(main, arguments, capsys)
    cut(first)
    assert "there is none before it" in error_of(main, [f"checkpoint={first}", *arguments[1:]], capsys)


def test_export_to_an_unwritable_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, GPT(SHAPE))
    (tmp_path / "file").write_text("in the way")
    for to in (tmp_path / "file", tmp_path / "file" / "hf"):
        error = error_of(export_main, [f"checkpoint={tmp_path}", f"to={to}"], capsys)
        assert f"to={str(to)!r} cannot be written" in error and "choose another folder" in error
