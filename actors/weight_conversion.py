"""Turns one GGUF file into a folder that ``transformers`` loads: bfloat16 safetensors and a tokenizer.

The work runs in a process of its own, ``python -m paceline.actors.weight_conversion GGUF FOLDER``: it holds
the whole model in memory for a moment and prints much, and none of that may stay with the caller.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.actors.engine.errors import ModelError

_BAR = re.compile(r"(\d+)/(\d+) \[")
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def convert_gguf(gguf: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Convert ``gguf`` into the existing, empty ``folder``, in a child process.

    Args:
        progress: called with (tensors converted, tensors in all).

    Raises:
        ModelError: the file is cut into several, or ``transformers`` cannot read it.
    """
    if _SPLIT_NAME.search(gguf.name):
        raise ModelError(f"{gguf}: one file of several; merge them into one GGUF file first")
    command = [sys.executable, "-m", "paceline.actors.weight_conversion", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tail = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        most = 0
        try:
            # Progress bars end in carriage returns, so there are no lines to wait for.
            while chunk := os.read(process.stderr.fileno(), 1 << 16):
                text = chunk.decode(errors="replace")
                tail = (tail + text)[-4000:]
                for done, total in _BAR.findall(text):
                    # Bars of a few shards are no measure of the work, and a second bar starts over.
                    if int(total) > 8 and int(done) > most:
                        most = int(done)
                        progress(most, int(total))
        except BaseException:
            process.terminate()
            raise
        if process.wait() != 0:
            lines = [line.strip() for line in re.split(r"[\r\n]+", tail) if line.strip()]
            reason = lines[-1] if lines else f"the converter ended with status {process.returncode}"
            raise ModelError(f"{gguf}: cannot be converted: {reason}")


def _convert(gguf: Path, folder: Path) -> None:
    import gguf as gguf_package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Parsing the file's token list takes seconds, and transformers opens the same file four times.
    gguf_package.GGUFReader = functools.lru_cache(maxsize=1)(gguf_package.GGUFReader)
    # transformers wants a folder and a file name, and looks into the folder for other things.
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch, "model.gguf")
        link.symlink_to(gguf.resolve())
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=link.name)
        model = AutoModelForCausalLM.from_pretrained(
            scratch,
            gguf_file=link.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is not embedding and torch.equal(head, embedding):
        # A tied model whose file holds the matrix twice. Files that quantise the two differently are
        # left alone: then they are two matrices.
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
