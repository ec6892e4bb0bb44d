"""The named policies, as data. Each is an ordinary policy: what it does is all here and in the catalogue.

``float32``, ``float16`` and ``bfloat16`` leave every op to the catalogue, the same on every device. ``auto`` takes the
16-bit format that the device computes natively, else float32.

``O0`` to ``O3`` are the levels of NVIDIA's Apex (``apex.amp``, ``frontend.py`` and ``_initialize.py``), in this
vocabulary:

=====  ==========================================  ==================================================================
level  in Apex                                     here
=====  ==========================================  ==================================================================
O0     model cast to float32, loss scale 1         float32 everywhere
O1     functions patched by lists, dynamic scale   float16 by the catalogue: the preset ``float16``
O2     model cast to float16 but for batch norms,  every class of arithmetic low, all norms high, float32 master
       float32 masters, dynamic scale              weights, dynamic scale
O3     model cast to float16, loss scale 1         every class of arithmetic low, norms too, no scaling
=====  ==========================================  ==================================================================

In O2 and O3 Apex cast the model's outputs back to float32, so losses were computed in float32: they are high here.
Two differences are deliberate. O2 keeps all norms in float32, not batch norms alone. O3 does not turn float32 weights
into float16 ones: the weights stay in the dtype the caller gave them, and only the arithmetic is float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["PRESETS"]

_ARITHMETIC = ("matmul", "conv", "attention", "rnn", "elementwise", "exp_log", "reduction", "pool", "interpolate")
_MODEL_IN_FP16 = {f"class:{kind}": "low" for kind in _ARITHMETIC} | {"class:loss": "high"}

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "float32": {"format": "float32"},
        "float16": {"format": "float16"},
        "bfloat16": {"format": "bfloat16"},
        "auto": {"format": "auto"},
        "O0": {"format": "float32"},
        "O1": {"format": "float16"},
        "O2": {"format": "float16", "ops": _MODEL_IN_FP16 | {"class:norm": "high"}, "weights": "master"},
        "O3": {"format": "float16", "ops": _MODEL_IN_FP16 | {"class:norm": "low"}, "scaling": {"enabled": False}},
    }
)
