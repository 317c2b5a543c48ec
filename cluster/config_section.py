"""What all sections of the configuration share: the base class and the ranges of their values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
OptionalCount = Annotated[int | None, Field(ge=1)]
OptionalAmount = Annotated[int | None, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(min_length=1)]
OptionalName = Annotated[str | None, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no guessing of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def given(self) -> dict[str, Any]:
        """What was written down, without defaults: enough to build an equal section."""
        return self.model_dump(exclude_unset=True, mode="json")
