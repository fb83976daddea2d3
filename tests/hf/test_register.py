"""register(): names of transformers, saved configs, versions, and what is imported when."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import AutoModelForCausalLM

import ringspan.hf
from tests.hf.models import make_model

ROOT = Path(__file__).resolve().parents[2]


def test_transformers_is_imported_by_register_only() -> None:
    program = (
        "import sys, ringspan; assert 'ringspan.hf' not in sys.modules; import ringspan.hf\n"
        "assert 'transformers' not in sys.modules; ringspan.hf.register(); assert 'transformers' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_saved_model_loads_with_and_without_the_name(tmp_path: Path) -> None:
    make_model("mistral", "ringspan").save_pretrained(tmp_path)
    assert "ringspan" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ringspan")
    assert model.config._attn_implementation == "ringspan"
    model.set_attn_implementation("eager")
    model.set_attn_implementation("ringspan")


def test_registering_again_changes_nothing() -> None:
    losses = dict(transformers.loss.loss_utils.LOSS_MAPPING)
    ringspan.hf.register()
    assert losses == transformers.loss.loss_utils.LOSS_MAPPING


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ValueError, match=r"transformers=4\.57\.1 is too old: 5 and newer work"):
        ringspan.hf.register()


def test_a_changed_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.masking_utils.packed_sequence_mask_function")
    with pytest.raises(ValueError, match=r"transformers=5\..* another interface .*packed_sequence_mask_function"):
        ringspan.hf.register()
