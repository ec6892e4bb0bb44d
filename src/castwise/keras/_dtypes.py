"""The dtype policy that a layer carries while Castwise decides its formats.

To Keras, and in files, it is a plain ``DTypePolicy`` of one of Keras' own names. It differs in one thing: inside a
region (a call of a model that ``apply`` has prepared) the layer is a float32 layer that casts nothing, so that its
``call`` runs as it was written and every format in it is the policy's. Outside of regions, a layer that is called by
itself does what Keras does under that name.
"""

from __future__ import annotations

from typing import Any

from castwise.formats import BF16, FP16, NumberFormat

from ._internals import keras
from ._state import active

__all__ = ["KerasNamed", "RegionPolicy", "keras_name"]

_WIDE = "float32"


def keras_name(fmt: NumberFormat) -> str:
    """Keras' name of the policy that computes in a format and keeps float32 weights."""
    if fmt is FP16:
        return "mixed_float16"
    if fmt is BF16 or fmt.bits < FP16.bits:  # 8-bit formats are for products' inputs: what surrounds them is bfloat16
        return "mixed_bfloat16"
    return "float64" if fmt.bits > 32 else _WIDE


class _SavedAsKerasPolicy:
    """What is written to files, copied and pickled is a policy of Keras' own."""

    __class__ = property(lambda self: keras.DTypePolicy)


class KerasNamed(_SavedAsKerasPolicy, keras.DTypePolicy):  # type: ignore[misc]
    """A dtype policy of Castwise's that to Keras, and in files, is the one of this name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return keras.DTypePolicy, (self.name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, keras.DTypePolicy) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class RegionPolicy(KerasNamed):
    """A Keras dtype policy that steps aside inside a region.

    Args:
        name: Keras' name: ``"mixed_bfloat16"``, ``"mixed_float16"``, ``"float32"`` or ``"float64"``.
        root: whether it is the prepared model's own, which is never called outside of its region.
    """

    def __init__(self, name: str, *, root: bool = False) -> None:
        super().__init__(name)
        self._root = root

    @property
    def compute_dtype(self) -> str:
        """The dtype that the layer's code sees: inside a region, that of its weights."""
        return str(self._variable_dtype if self._root or active() is not None else self._compute_dtype)

    def convert_input(self, x: Any, autocast: bool, dtype: Any) -> Any:
        """An argument of the layer as a tensor; Keras casts it outside of regions, and inside nothing does."""
        if not self._root and active() is None:
            return super().convert_input(x, autocast, dtype)
        kept = getattr(x, "dtype", None) is not None and keras.backend.standardize_dtype(x.dtype) in _KEPT
        return super().convert_input(x, autocast and not kept, dtype)


# What flows between the layers of a region. Anything wider (an array of NumPy's float64) is Keras' to narrow.
_KEPT = frozenset({"float16", "bfloat16", "float32"})
