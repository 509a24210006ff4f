"""Base class of the sections of a launch config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)
