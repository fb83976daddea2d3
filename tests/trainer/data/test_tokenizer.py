"""Tokenizers: round trips, published tiktoken files, vocabulary sizes, and errors with their remedy."""

import base64
import builtins
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer.config.schema import Config, Data, Model, Source, TokenizerOptions
from ringspan.trainer.data import tokenizer

TEXTS = ["def main():\n    pass\n", "naïve café — 東京 🙂", "a  b\t\n"]


def hf_file(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "<odd>"]
    )
    built.train_from_iterator(["def main return pass self"] * 9, trainer)
    built.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def tiktoken_file(folder: Path, num: int, gap: int = -1) -> Path:
    """A file with `num` ranks, as in a published file, but invented tokens; no token has the rank `gap`."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"de", b"def", b" m"]
    tokens += [b"\xff%d" % i for i in range(len(tokens), num)]
    lines = [base64.b64encode(token) + b" %d" % (rank + (0 <= gap <= rank)) for rank, token in enumerate(tokens)]
    (folder / f"{num}.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return folder / f"{num}.tiktoken"


def validate_round_trip(loaded: tokenizer.Tokenizer) -> list[np.ndarray]:
    """Encode and decode TEXTS; return the ids."""
    encoded = list(loaded.encode([text.encode() for text in TEXTS]))
    for ids, text in zip(encoded, TEXTS, strict=True):
        assert ids.max() < loaded.size and loaded.end not in ids
        assert loaded.decode(ids.tolist()) == text
        assert loaded.decode([*ids.tolist(), loaded.end]) == text
    assert loaded.end < loaded.size
    return encoded


def test_bytes() -> None:
    loaded = tokenizer.load(TokenizerOptions())
    assert [ids.tolist() for ids in validate_round_trip(loaded)] == [list(text.encode()) for text in TEXTS]
    assert (loaded.size, loaded.end) == (257, 256)
    assert loaded.decode([0xE6, 300, 65]) == "\ufffdA"  # a broken character, then an id of the padded vocabulary


def test_hugging_face(tmp_path: Path) -> None:
    path = hf_file(tmp_path)
    loaded = tokenizer.load(TokenizerOptions(kind="hf", path=str(path)))
    encoded = validate_round_trip(loaded)
    assert loaded.end == 0 and len(encoded[0]) < len(TEXTS[0].encode())
    assert tokenizer.load(TokenizerOptions(kind="hf", path=str(tmp_path))).fingerprint == loaded.fingerprint
    other = tokenizer.load(TokenizerOptions(kind="hf", path=str(path), end="<odd>"))
    assert other.end == 1 and other.fingerprint != loaded.fingerprint
    with pytest.raises(ValueError, match=r"has no token <none>"):
        tokenizer.load(TokenizerOptions(kind="hf", path=str(path), end="<none>"))
    with_begin = tokenizer.load(TokenizerOptions(kind="hf", path=str(path), begin="<odd>"))
    assert (loaded.begin, with_begin.begin, with_begin.end) == ((), (1,), 0)
    assert len({loaded.fingerprint, other.fingerprint, with_begin.fingerprint}) == 3
    assert [ids.tolist() for ids in validate_round_trip(with_begin)] == [ids.tolist() for ids in encoded]
    with pytest.raises(ValueError, match=r"tokenizer.begin='<none>': .* has no such token"):
        tokenizer.load(TokenizerOptions(kind="hf", path=str(path), begin="<none>"))


@pytest.mark.parametrize(
    ("num", "gap", "end", "size"),
    [
        (50256, -1, 50256, 50257),
        (50280, 50256, 50256, 50281),
        (100256, -1, 100257, 100258),
        (128000, -1, 128001, 128002),
        (199998, -1, 199999, 200000),
    ],
)
def test_published_tiktoken_file_is_identified_by_its_number_of_ranks(
    tmp_path: Path, num: int, gap: int, end: int, size: int
) -> None:
    path = str(tiktoken_file(tmp_path, num, gap))
    loaded = tokenizer.load(TokenizerOptions(kind="tiktoken", path=path))
    encoded = validate_round_trip(loaded)
    assert (loaded.end, loaded.size) == (end, size) and encoded[0][0] == 257  # "def"
    for option in ("begin", "end"):
        with pytest.raises(ValueError, match=rf"tokenizer.{option}='<none>': .* has <\|end"):
            tokenizer.load(TokenizerOptions(kind="tiktoken", path=path, **{option: "<none>"}))


def test_llama_3_has_a_begin_token(tmp_path: Path) -> None:
    path = str(tiktoken_file(tmp_path, 128000))
    loaded, with_begin = (
        tokenizer.load(TokenizerOptions(kind="tiktoken", path=path, begin=x)) for x in ("", "<|begin_of_text|>")
    )
    assert (loaded.begin, with_begin.begin, with_begin.end) == (
        (),
        (128000,),
        128001,
    ) and loaded.fingerprint != with_begin.fingerprint


def test_tiktoken_file_with_another_number_of_ranks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"300.tiktoken' has 300 ranks; .*50256, .*tokenizer.kind=hf"):
        tokenizer.load(TokenizerOptions(kind="tiktoken", path=str(tiktoken_file(tmp_path, 300))))


@pytest.mark.parametrize(("old", "new"), [(b" 300\n", b" 301\n"), (b"\nAQ== 1\n", b"\n")])
def test_damaged_tiktoken_file_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    """A rank that occurs twice, and a byte without one; the library would raise from its extension, or much later."""
    path = tiktoken_file(tmp_path, 50256)
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match=r"50256.tiktoken' is damaged: a rank occurs twice, or a single byte has none"):
        tokenizer.load(TokenizerOptions(kind="tiktoken", path=str(path)))


@pytest.mark.parametrize(("name", "num"), [("r50k", 50256), ("p50k", 50280), ("cl100k", 100256), ("o200k", 199998)])
def test_patterns_split_text_like_the_library(monkeypatch: pytest.MonkeyPatch, name: str, num: int) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    regex = pytest.importorskip("regex")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})  # no download
    published = getattr(public, f"{name}_base")()
    pattern, special = tokenizer.TIKTOKEN[num]
    assert special.items() <= published["special_tokens"].items()
    texts = [*TEXTS, "it's IT'S HTMLParser e\u0301 12345 6 ,;\r\n /path//\n\n  x  \n end  ", Path(__file__).read_text()]
    for text in texts:
        assert regex.findall(pattern, text) == regex.findall(published["pat_str"], text)


def test_vocabulary_is_the_tokenizer_size_rounded_up() -> None:
    loaded = tokenizer.load(TokenizerOptions())
    assert tokenizer.vocabulary_size(0, loaded) == 320
    assert tokenizer.vocabulary_size(257, loaded) == 257
    with pytest.raises(ValueError, match=r"model.vocabulary=256: the tokenizer has 257"):
        tokenizer.vocabulary_size(256, loaded)


@pytest.mark.parametrize(("kind", "library"), [("hf", "tokenizers"), ("tiktoken", "tiktoken")])
def test_missing_library_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str
) -> None:
    original = builtins.__import__

    def import_without_library(name, *args, **kwargs):
        if name == library:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(builtins, "__import__", import_without_library)
    with pytest.raises(ValueError, match=f"pip install {library}"):
        tokenizer.load(TokenizerOptions(kind=kind, path=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="hf"), "tokenizer.path='': tokenizer.kind=hf needs a file"),
        (dict(kind="tiktoken", path="nowhere"), "tokenizer.path='nowhere'"),
    ],
)
def test_invalid_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.load(TokenizerOptions(**options))


@pytest.mark.parametrize("kind", ["hf", "tiktoken"])
def test_file_of_another_kind_is_rejected(tmp_path: Path, kind: str) -> None:
    pytest.importorskip({"hf": "tokenizers"}.get(kind, kind))
    (tmp_path / "file").write_text("no such thing\n")
    with pytest.raises(ValueError, match=r"tokenizer.path=.* is no "):
        tokenizer.load(TokenizerOptions(kind=kind, path=str(tmp_path / "file")))


def test_only_token_shards_may_have_fewer_ids_than_the_tokenizer() -> None:
    def size(vocabulary: int, *kinds: str) -> int:
        sources = {kind: Source(kind=kind) for kind in kinds}
        options = Config(model=Model(vocabulary=vocabulary), data=Data(sources=sources))
        return tokenizer.resolve_model(options, tokenizer.load(TokenizerOptions())).vocabulary

    assert size(64, "tokens") == 64 and size(0, "tokens") == 320
    for kinds in (("tokens", "recall"), ("text",), ()):
        with pytest.raises(ValueError, match=r"model.vocabulary=64: the tokenizer has 257"):
            size(64, *kinds)
