"""What a conversion did, and why: as data, as JSON and as a page to read."""

from __future__ import annotations

import html
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from castwise import _files
from castwise.onnx._evaluate import OutputError
from castwise.onnx._search import Step

__all__ = ["NodeRow", "Report"]


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node with floating operands, the format it computes in, and why where that is fp32."""

    node: str
    op: str
    format: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    model: str
    format: str
    target: str
    tolerance: float | None
    nodes: tuple[NodeRow, ...]
    products: int
    """Products and convolutions in the model, and"""
    products_low: int
    """how many of them compute in 16 bits."""
    casts: int
    """Casts that were added."""
    bytes_before: int
    bytes_after: int
    """Of all constants of the model."""
    outputs: tuple[OutputError, ...]
    """Errors against fp32; empty where nothing could be run."""
    largest: tuple[tuple[str, float], ...]
    """The tensors with the largest values in fp32."""
    notes: tuple[str, ...]
    """What was changed on purpose, what was left alone, and what could not be checked."""
    steps: tuple[Step, ...]
    engine: str
    """What the evaluator ran on; empty where nothing was run."""
    calibrated: bool
    """Whether the inputs were given rather than made up."""
    samples: int
    seconds: float
    fingerprint: Mapping[str, str]

    @property
    def error(self) -> float:
        """The largest error of any output: max |difference| / max(1, max |fp32 value|)."""
        return max((output.error for output in self.outputs), default=0.0)

    @property
    def wide(self) -> tuple[NodeRow, ...]:
        """The nodes that stayed in fp32."""
        return tuple(row for row in self.nodes if row.format == "fp32")

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON. Numbers that are not finite become None."""
        data = asdict(self)
        data["error"], data["wide"] = self.error, len(self.wide)
        plain: dict[str, object] = _finite(data)  # type: ignore[assignment]
        return plain

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report: HTML where the name ends in ``.html``, else JSON."""
        if Path(path).suffix.lower() in (".html", ".htm"):
            return _files.write_text(path, self.to_html())
        return _files.write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def summary(self) -> str:
        """The report in a few lines."""
        share = f"{self.products_low} of {self.products} products and convolutions in {self.format}"
        size = f"{_megabytes(self.bytes_before)} of weights became {_megabytes(self.bytes_after)}"
        lines = [f"{share}; {len(self.wide)} of {len(self.nodes)} nodes stay fp32; {self.casts} casts; {size}."]
        if self.outputs:
            source = f"{self.samples} given samples" if self.calibrated else "inputs that were made up"
            lines.append(f"Largest error of an output on {source}: {self.error:.2g}.")
        lines += [f"- {note}" for note in self.notes]
        reasons = Counter(row.reason for row in self.wide)
        lines += [f"- fp32: {count} x {reason}" for reason, count in reasons.most_common(8)]
        return "\n".join(lines)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        outputs = [(o.name, f"{o.error:.3g}", f"{o.absolute:.3g}", f"{o.largest:.4g}") for o in self.outputs]
        steps = [(s.what, str(s.wide), "" if s.error is None else f"{s.error:.3g}") for s in self.steps]
        parts = [
            f"<h1>{html.escape(self.model)} in {html.escape(self.format)}</h1>",
            f"<p>{html.escape(self.summary().splitlines()[0])}</p>",
            _table("Outputs against fp32", ("output", "error", "absolute", "largest value"), outputs),
            _table("What was found and changed", ("note",), [(note,) for note in self.notes]),
            _table("Steps", ("step", "wide ops", "error"), steps),
            _table(
                "Nodes in fp32, and why",
                ("node", "operator", "reason"),
                [(row.node, row.op, row.reason) for row in self.wide],
            ),
            _table("Largest values", ("tensor", "largest |value|"), [(n, f"{v:.4g}") for n, v in self.largest]),
            _table("Made for", ("what", "value"), list(self.fingerprint.items())),
        ]
        title = f"<title>{html.escape(self.model)}</title>"
        return f"<!doctype html><html lang=en>{_HEAD}{title}{_STYLE}<body>{''.join(parts)}\n"


_HEAD = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
_STYLE = (
    "<style>:root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;"
    "padding:0 1em}table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25em .6em .25em 0;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent);vertical-align:top;overflow-wrap:anywhere}"
    "td{font-variant-numeric:tabular-nums}h1{font-size:1.5em;overflow-wrap:anywhere}h2{margin-top:1.6em;"
    "font-size:1.1em}</style>"
)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    header = "".join(f"<th>{html.escape(cell)}" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><tr>{header}{body}</table>"


def _finite(data: object) -> object:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
