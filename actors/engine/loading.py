"""Loads a ``transformers`` causal LM with the paged attention function selected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from paceline.actors.engine.attention import ATTENTION_NAME
from paceline.actors.engine.elementwise import align_activations
from paceline.actors.engine.errors import ModelError
from paceline.actors.engine.memory import is_out_of_memory
from paceline.actors.engine.packed_linear import can_pack_linears, pack_linears
from paceline.actors.engine.quantized_linear import quantize_linears, resolve_quantization
from paceline.actors.engine.row_tiles import tile_rows
from paceline.actors.engine.shard_group import ShardGroup
from paceline.actors.engine.sharded_layers import localize_layers
from paceline.actors.engine.tensor_parallel import check_tensor_parallel

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_TOO_LARGE = (
    "its weights do not fit into the memory: use a smaller model or dtype, or a larger tensor_parallel_size"
)


def resolve_dtype(name: str, folder_or_hub_id: str, *, trust_remote_code: bool = False) -> torch.dtype:
    """The dtype of that name; "auto" is what the model's configuration says, else float32.

    Raises:
        ModelError: an unknown name, or "auto" and the configuration cannot be read.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
        return DTYPES[name]
    config = load_model_config(folder_or_hub_id, trust_remote_code=trust_remote_code)
    stated = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return next((dtype for dtype in DTYPES.values() if dtype == stated), torch.float32)


def load_model_config(folder_or_hub_id: str, *, trust_remote_code: bool = False) -> Any:
    """The ``transformers`` configuration of a model, without its weights.

    Raises:
        ModelError: missing folder or file, unknown architecture, no network; the text names the remedy.
    """
    _check_folder(folder_or_hub_id)
    with _quiet(), _explained(folder_or_hub_id):
        return AutoConfig.from_pretrained(folder_or_hub_id, trust_remote_code=trust_remote_code)


def load_model(
    folder_or_hub_id: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    allow_pickled_weights: bool = False,
    pack_weights: bool = True,
    quantization: str = "none",
    deterministic: bool = True,
    group: ShardGroup | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference, in evaluation mode, its attention over the paged cache.

    Tied embeddings stay one tensor, unless ``pack_weights`` makes the output layer a packed copy.

    Args:
        folder_or_hub_id: a local folder with ``config.json`` and safetensors, or an id of the model hub.
        trust_remote_code: run code that comes with the model.
        allow_pickled_weights: load pickle files where there are no safetensors. Unpickling can run code.
        pack_weights: on a CPU in bfloat16 or float32, lay out the weights for its kernels (faster; such a
            model cannot be copied or moved).
        quantization: "int8" computes the linear layers in 8-bit integers (CPU only; another law, close to the
            model's), "auto" does where this processor can, "none" never.
        deterministic: make the layers batch-invariant: a row's result does not depend on the other rows, to
            the bit. On a CPU this needs ``pack_weights``; the attention's part is the runner's.
        group: load this rank's share only, by the model's tensor-parallel plan. Of safetensors, a rank reads
            only its slices. All ranks must load the same.

    Raises:
        ModelError: missing folder or file, unknown architecture, no network, a model that does not fit or
            cannot be divided, or a quantisation that is not available; the text names the remedy.
    """
    quantization = resolve_quantization(quantization, device)
    config = load_model_config(folder_or_hub_id, trust_remote_code=trust_remote_code)
    if not allow_pickled_weights:
        _check_weights(folder_or_hub_id)
    if group is not None:
        check_tensor_parallel(config, group.size, folder_or_hub_id)
        _check_accelerator(device)
    with _quiet(), _explained(folder_or_hub_id):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder_or_hub_id,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickled_weights else True,
            distributed_config=None if group is None else DistributedConfig(tp_size=group.size),
        )
        if group is not None:
            localize_layers(model, model.tp_plan, group)
        model = model.to(device)
    model.eval()
    model.requires_grad_(False)
    if quantization == "int8":
        quantize_linears(model)
    if pack_weights and can_pack_linears(dtype, device):
        pack_linears(model, batch_invariant=deterministic)
    if deterministic and device.type == "cpu":
        align_activations(model)
    elif deterministic:
        tile_rows(model)
    return model


def _check_accelerator(device: torch.device) -> None:
    """``transformers`` shards a model on the accelerator that torch finds, whatever is asked for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None else accelerator.type
    if found != device.type:
        raise ModelError(
            f"device: a model is sharded on {found} here, yet {device.type} was asked for: choose {found}, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )


def _check_folder(source: str) -> None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{source}: the folder has no config.json: give a folder saved by transformers")
        return
    if folder.exists():
        raise ModelError(f"{source}: is a file: give the folder of a model, or its id on the model hub")
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") != 1 or source.endswith("/")
    if looks_like_path:
        raise ModelError(
            f"{source}: no such folder: check the path, or give an id of the model hub (organisation/name)"
        )


def _check_weights(source: str) -> None:
    folder = Path(source).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelError(
            f"{source}: its weights are pickled, and unpickling can run code: save it as safetensors "
            "(save_pretrained does), or set allow_pickled_weights if you trust it"
        )


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn what goes wrong in loading into a ``ModelError`` that says what to do."""
    try:
        yield
    except MemoryError as error:
        raise ModelError(f"{source}: {_TOO_LARGE}") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise ModelError(f"{source}: {_TOO_LARGE}") from error
        raise ModelError(f"{source}: {_reason(source, error)}") from error


def _reason(source: str, error: Exception) -> str:
    text = str(error).strip()
    lowered = text.lower()
    first_line = text.splitlines()[0] if text else type(error).__name__
    if "trust_remote_code" in lowered:
        return "brings its own code: set trust_remote_code if you trust it"
    if "safetensors" in lowered and "does not appear to have a file named" in lowered:
        return "has no safetensors: set allow_pickled_weights if you trust its pickled weights"
    if "does not recognize this architecture" in lowered or "unrecognized model" in lowered:
        return f"its architecture is unknown to this transformers; a newer one may know it ({first_line})"
    if "unrecognized configuration class" in lowered:
        return f"is no causal language model ({first_line})"
    if isinstance(error, ImportError):
        return f"needs a package that is not installed ({first_line})"
    if Path(source).expanduser().is_dir():
        return f"cannot be loaded; is the folder complete? ({first_line})"
    if "gated" in lowered or "401" in lowered or "403" in lowered:
        return "the model hub refuses access: accept the model's terms there and set HF_TOKEN"
    if "not a valid model identifier" in lowered or "404" in lowered:
        return "is neither a local folder nor a model on the hub: check the spelling"
    return f"cannot be fetched from the model hub: check the network, or give a local folder ({first_line})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and notes of ``transformers`` while it loads, and put its settings back."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
