"""Loading a model runs no code that came with it: neither its own modules nor what hides in a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.loading import load_model, load_model_config
from tests.engine.models import tiny_llama

CPU = torch.device("cpu")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A model whose weights are a pickle."""
    model = tiny_llama()
    folder = tmp_path / "pickled"
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_are_refused_unless_they_are_allowed(pickled: Path) -> None:
    with pytest.raises(
        ModelError, match=r"its weights are pickled.* set allow_pickled_weights if you trust it"
    ):
        load_model(str(pickled), torch.float32, CPU)
    loaded = load_model(str(pickled), torch.float32, CPU, allow_pickled_weights=True, pack_weights=False)
    expected = tiny_llama().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_what_hides_in_a_pickle_does_not_run(pickled: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"model.norm.weight": Trap(sprung)}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match="its weights are pickled"):
        load_model(str(pickled), torch.float32, CPU)
    assert not sprung.exists()


def test_safetensors_are_taken_although_a_pickle_lies_beside_them(pickled: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    tiny_llama().save_pretrained(pickled)
    torch.save({"model.norm.weight": Trap(sprung)}, pickled / "pytorch_model.bin")
    load_model(str(pickled), torch.float32, CPU)
    assert not sprung.exists()


def test_a_models_own_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    imported = tmp_path / "imported"
    folder = tmp_path / "own-code"
    folder.mkdir()
    (folder / "own.py").write_text(
        f"open({str(imported)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = tiny_llama().config.to_dict() | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ModelError, match="brings its own code: set trust_remote_code if you trust it"):
        load_model(str(folder), torch.float32, CPU)
    assert not imported.exists()
    assert load_model_config(str(folder), trust_remote_code=True).model_type == "own"
    assert imported.exists()
