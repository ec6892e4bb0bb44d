"""What was done to a SavedModel, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ._measure import versions

__all__ = ["Conversion", "SignatureReport"]


@dataclass(frozen=True)
class SignatureReport:
    """What was done to one signature."""

    name: str
    products: int
    products_low: int
    wide: Mapping[str, str]
    """Operations with a choice that stayed in float32, and why."""
    error: float
    """On the samples held out, of the model as it was written to disk: max |difference| / max(1, max |fp32 value|)."""
    trials: int


@dataclass(frozen=True)
class Conversion:
    """What was done to a SavedModel."""

    path: Path
    format: str
    tolerance: float
    calibrated: bool
    signatures: tuple[SignatureReport, ...]
    left_out: tuple[str, ...]
    """Functions of the model that are no signature and are not what one calls: they are not in the result."""

    def summary(self) -> str:
        """The conversion in a few lines."""
        lines = [f"{self.path}: {self.format}, tolerance {self.tolerance:g}"]
        for one in self.signatures:
            lines.append(
                f"  {one.name}: {one.products_low} of {one.products} products low, {len(one.wide)} other operations "
                f"wide, error {one.error:.3g} on samples held out"
            )
        if not self.calibrated:
            lines.append("  note: inputs were made up; give --calibrate to check on real ones")
        if self.left_out:
            lines.append(f"  note: left out, as no signature calls them: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The conversion as plain data for JSON."""
        return {
            "format": self.format,
            "tolerance": self.tolerance,
            "calibrated": self.calibrated,
            "versions": versions(),
            "signatures": [{**vars(one), "wide": dict(one.wide)} for one in self.signatures],
            "left_out": list(self.left_out),
        }
