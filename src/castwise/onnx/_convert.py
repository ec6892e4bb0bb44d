"""``convert``: which formats to try, and which result is the best of them."""

from __future__ import annotations

import logging
import os
import time

import onnx

from castwise.formats import parse_format
from castwise.onnx import _targets
from castwise.onnx._errors import ConversionError
from castwise.onnx._source import read
from castwise.onnx._stamp import is_unchanged
from castwise.onnx._work import TOLERANCES, Conversion, Work
from castwise.policy import Policy

__all__ = ["Conversion", "convert"]

log = logging.getLogger("castwise.onnx")


def convert(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
    *,
    format: str | None = None,
    calibration: object = None,
    tolerance: float | None = None,
    keep_io: bool = True,
    policy: object = None,
    target: str | None = None,
) -> Conversion:
    """Convert a model to mixed precision.

    Args:
        model: a path, bytes, or a ``ModelProto``, which is not changed. External data needs a path.
        format: ``"float16"`` or ``"bfloat16"``: as few wide nodes as tolerance and policy allow, then as few casts.
            ``"auto"``: the format and plan that cost the least time on ``target``. By default what the policy says for
            the target, and float16 where it says nothing.
        calibration: feeds (input name -> array): one, several, an ``.npz`` file or a folder of them. Without, inputs
            are made up from types and shapes, which shows that the result runs, but not what real values do.
        tolerance: the largest error allowed of any output, max |difference| / max(1, max |fp32 value|).
        keep_io: inputs and outputs keep their types. Otherwise they are what the nodes next to them compute in.
        policy: rules for ops and layers, as everywhere in Castwise; layers are module paths where the exporter wrote
            them down, else node names with dots.
        target: the runtime it is for, one of ``castwise.onnx.TARGETS``.

    Returns:
        The conversion. Its model has passed ONNX's full checker.

    Raises:
        ConversionError: the model is not valid, or the tolerance cannot be kept, or the arguments make no sense.
    """
    started = time.perf_counter()
    profile = _targets.get(target) if target is not None else None
    base = Policy() if policy is None else Policy.coerce(policy)
    device = profile.device if profile is not None else None
    if format is None:
        asked = base.format_on(device)
        format = "float16" if asked == "auto" else asked
    formats = _targets.choose_formats(format, profile)
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 < float(tolerance) < float("inf")):
        raise ConversionError(f"tolerance: {tolerance!r} is no error to keep. Give a positive number such as 1e-2.")
    source = read(model)
    works = []
    for fmt in formats:
        rules = base.in_format(parse_format(fmt).long_name).resolve(device)
        settings = {
            "format": format,
            "tolerance": repr(tolerance),
            "keep_io": keep_io,
            "target": target,
            "rules": rules.to_dict(),
        }
        works.append(Work(source, fmt, keep_io, rules, profile, tolerance, auto=format == "auto", settings=settings))
        if is_unchanged(source.skeleton, settings):
            return works[-1].unchanged(started)
    return _fastest(works, calibration, started)


def _fastest(works: list[Work], calibration: object, started: float) -> Conversion:
    """The one that is predicted to be the fastest. A further format is tried where the best leaves products wide."""
    best = works[0].run(calibration, started)
    for work in works[1:]:
        if best.report.products_low == best.report.products:
            break
        work.tolerance = work.tolerance if work.tolerance is not None else TOLERANCES[best.fmt]
        try:
            other = work.run(calibration, started)
        except ConversionError as error:
            log.info("%s: %s", work.fmt, error)
            continue
        assert best.plan is not None and other.plan is not None
        if other.plan.score.seconds < best.plan.score.seconds:
            best = other
    return best
