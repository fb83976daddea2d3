"""A trained tokenizer: it round-trips text, each digit is a token, and needles have values of at least two tokens."""

from pathlib import Path

import pytest

from ringspan.trainer.config.schema import Data, Source, TokenizerOptions
from ringspan.trainer.data import tokenizer, train_tokenizer
from ringspan.trainer.data.dataset import Dataset

pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[3]


def test_a_trained_tokenizer_reads_text_and_needles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_tokenizer.main([f"to={tmp_path}/bpe", "size=512", f"paths=[{ROOT}/trainer/data/*.py]"])
    assert "512 tokens: use them with tokenizer=hf" in capsys.readouterr().out
    loaded = tokenizer.load(TokenizerOptions(kind="hf", path=str(tmp_path / "bpe")))
    assert loaded.size == 512
    text = (ROOT / "trainer" / "data" / "packing.py").read_bytes()
    (ids,) = loaded.encode([text])
    assert loaded.decode(ids) == text.decode() and len(ids) < 0.6 * len(text)
    (number,) = loaded.encode([b"x12345"])
    assert len(number) == 6
    data = Dataset(Data(length=4096, sources={"n": Source(kind="needles")}), loaded, 0)
    answers = data.sources[0].answers(0)
    assert all(len(set(row)) >= 5 for row in answers.positions.tolist())


def test_wrong_options_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ([], "to='': name the folder to write"),
        ([f"to={tmp_path}", "size=100"], "size=100: it must be at least 257"),
        ([f"to={tmp_path}", f"paths=[{tmp_path}/none]"], "matches no file"),
    ):
        with pytest.raises(SystemExit) as stop:
            train_tokenizer.main(arguments)
        assert stop.value.code == 2 and text in capsys.readouterr().err
