"""Tokenizers: what goes in comes out, and what cannot work is said with its remedy."""

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
    """With as many ranks as a published file has, of tokens that are made up; no token has the rank `gap`."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"de", b"def", b" m"]
    tokens += [b"\xff%d" % i for i in range(len(tokens), num)]
    lines = [base64.b64encode(token) + b" %d" % (rank + (0 <= gap <= rank)) for rank, token in enumerate(tokens)]
    (folder / f"{num}.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return folder / f"{num}.tiktoken"


def check(found: tokenizer.Tokenizer) -> list[np.ndarray]:
    encoded = list(found.encode([text.encode() for text in TEXTS]))
    for ids, text in zip(encoded, TEXTS, strict=True):
        assert ids.max() < found.size and found.end not in ids
        assert found.decode(ids.tolist()) == text
        assert found.decode([*ids.tolist(), found.end]) == text
    assert found.end < found.size
    return encoded


def test_bytes() -> None:
    found = tokenizer.load(TokenizerOptions())
    assert [ids.tolist() for ids in check(found)] == [list(text.encode()) for text in TEXTS]
    assert (found.size, found.end) == (257, 256)
    assert found.decode([0xE6, 300, 65]) == "\ufffdA"  # a broken character, an id of the padded vocabulary


def test_hugging_face(tmp_path: Path) -> None:
    path = hf_file(tmp_path)
    found = tokenizer.load(TokenizerOptions(kind="hf", path=str(path)))
    encoded = check(found)
    assert found.end == 0 and len(encoded[0]) < len(TEXTS[0].encode())
    assert tokenizer.load(TokenizerOptions(kind="hf", path=str(tmp_path))).fingerprint == found.fingerprint
    other = tokenizer.load(TokenizerOptions(kind="hf", path=str(path), end="<odd>"))
    assert other.end == 1 and other.fingerprint != found.fingerprint
    with pytest.raises(ValueError, match=r"has no token <none>"):
        tokenizer.load(TokenizerOptions(kind="hf", path=str(path), end="<none>"))
    begun = tokenizer.load(TokenizerOptions(kind="hf", path=str(path), begin="<odd>"))
    assert (found.begin, begun.begin, begun.end) == ((), (1,), 0)
    assert len({found.fingerprint, other.fingerprint, begun.fingerprint}) == 3
    assert [ids.tolist() for ids in check(begun)] == [ids.tolist() for ids in encoded]
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
def test_a_published_tiktoken_file_is_known_by_its_size(tmp_path: Path, num: int, gap: int, end: int, size: int) -> None:
    path = str(tiktoken_file(tmp_path, num, gap))
    found = tokenizer.load(TokenizerOptions(kind="tiktoken", path=path))
    encoded = check(found)
    assert (found.end, found.size) == (end, size) and encoded[0][0] == 257  # "def"
    for option in ("begin", "end"):
        with pytest.raises(ValueError, match=rf"tokenizer.{option}='<none>': .* has <\|end"):
            tokenizer.load(TokenizerOptions(kind="tiktoken", path=path, **{option: "<none>"}))


def test_llama_3s_begin_is_known(tmp_path: Path) -> None:
    path = str(tiktoken_file(tmp_path, 128000))
    found, begun = (tokenizer.load(TokenizerOptions(kind="tiktoken", path=path, begin=x)) for x in ("", "<|begin_of_text|>"))
    assert (found.begin, begun.begin, begun.end) == ((), (128000,), 128001) and found.fingerprint != begun.fingerprint


def test_a_tiktoken_file_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"300.tiktoken' has 300 ranks; .*50256, .*tokenizer.kind=hf"):
        tokenizer.load(TokenizerOptions(kind="tiktoken", path=str(tiktoken_file(tmp_path, 300))))


@pytest.mark.parametrize(("name", "num"), [("r50k", 50256), ("p50k", 50280), ("cl100k", 100256), ("o200k", 199998)])
def test_text_is_split_as_the_library_splits_it(monkeypatch: pytest.MonkeyPatch, name: str, num: int) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    regex = pytest.importorskip("regex")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})  # which would ask the network
    theirs = getattr(public, f"{name}_base")()
    pattern, special = tokenizer.TIKTOKEN[num]
    assert special.items() <= theirs["special_tokens"].items()
    texts = [*TEXTS, "it's IT'S HTMLParser e\u0301 12345 6 ,;\r\n /path//\n\n  x  \n end  ", Path(__file__).read_text()]
    for text in texts:
        assert regex.findall(pattern, text) == regex.findall(theirs["pat_str"], text)


def test_the_vocabulary_is_the_tokenizers_rounded_up() -> None:
    found = tokenizer.load(TokenizerOptions())
    assert tokenizer.vocabulary(0, found) == 320
    assert tokenizer.vocabulary(257, found) == 257
    with pytest.raises(ValueError, match=r"model.vocabulary=256: the tokenizer has 257"):
        tokenizer.vocabulary(256, found)


@pytest.mark.parametrize(("kind", "library"), [("hf", "tokenizers"), ("tiktoken", "tiktoken")])
def test_a_missing_library_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str
) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == library:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=f"pip install {library}"):
        tokenizer.load(TokenizerOptions(kind=kind, path=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="hf"), "tokenizer.path='': tokenizer.kind=hf needs a file"),
        (dict(kind="tiktoken", path="nowhere"), "tokenizer.path='nowhere'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.load(TokenizerOptions(**options))


@pytest.mark.parametrize("kind", ["hf", "tiktoken"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, kind: str) -> None:
    pytest.importorskip({"hf": "tokenizers"}.get(kind, kind))
    (tmp_path / "file").write_text("no such thing\n")
    with pytest.raises(ValueError, match=r"tokenizer.path=.* is no "):
        tokenizer.load(TokenizerOptions(kind=kind, path=str(tmp_path / "file")))


def test_shards_alone_may_have_fewer_ids_than_the_tokenizer() -> None:
    def size(given: int, *kinds: str) -> int:
        sources = {kind: Source(kind=kind) for kind in kinds}
        options = Config(model=Model(vocabulary=given), data=Data(sources=sources))
        return tokenizer.resolved(options, tokenizer.load(TokenizerOptions())).vocabulary

    assert size(64, "tokens") == 64 and size(0, "tokens") == 320
    for kinds in (("tokens", "recall"), ("text",), ()):
        with pytest.raises(ValueError, match=r"model.vocabulary=64: the tokenizer has 257"):
            size(64, *kinds)
