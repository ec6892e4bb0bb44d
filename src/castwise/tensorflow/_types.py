"""What TensorFlow says of a node's dtypes: which of its tensors they are, and for which there are kernels."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from castwise.errors import PolicyError
from castwise.formats import NumberFormat

from ._internals import kernels_of

__all__ = ["Typing", "dtype_of", "format_of", "has_kernel", "typing_of"]

_BY_NAME = {"fp16": tf.float16, "bf16": tf.bfloat16, "fp32": tf.float32}
_FORMATS = {tf.float16: "fp16", tf.bfloat16: "bf16", tf.float32: "fp32", tf.float64: "fp64"}


def dtype_of(fmt: NumberFormat) -> Any:
    """TensorFlow's dtype of a format.

    Raises:
        PolicyError: it does not compute in it.
    """
    if fmt.name not in _BY_NAME:
        raise PolicyError(
            f"format: castwise.tensorflow does not compute in {fmt.long_name}. Choose float16, bfloat16 or float32."
        )
    return _BY_NAME[fmt.name]


def format_of(dtype: Any) -> str:
    """Castwise's short name of a dtype, or TensorFlow's where it is no number format."""
    return _FORMATS.get(dtype, str(dtype.name))


class Typing:
    """The float32 tensors among a node's inputs and outputs whose dtype the node leaves open, by type attribute."""

    def __init__(self, op: Any) -> None:
        wide = tf.float32.as_datatype_enum
        self.inputs: dict[int, str] = {}
        self.outputs: dict[int, str] = {}
        self.lists = False
        for args, places in ((op.op_def.input_arg, self.inputs), (op.op_def.output_arg, self.outputs)):
            place = 0
            for arg in args:
                if arg.type_list_attr:
                    self.lists = True
                    place += len(op.get_attr(arg.type_list_attr))
                    continue
                count = op.get_attr(arg.number_attr) if arg.number_attr else 1
                if arg.type_attr and op.get_attr(arg.type_attr).as_datatype_enum == wide:
                    places.update(dict.fromkeys(range(place, place + count), arg.type_attr))
                place += count

    @property
    def attrs(self) -> tuple[str, ...]:
        """Type attributes that an input has, in order."""
        return tuple(dict.fromkeys(self.inputs.values()))


def typing_of(op: Any) -> Typing:
    """The open float32 tensors of a node."""
    return Typing(op)


@functools.lru_cache(maxsize=4096)
def has_kernel(op_type: str, types: tuple[tuple[str, Any], ...]) -> bool:
    """Whether any device has a kernel of a kind of node whose type attributes are these (dtypes by name)."""
    wanted = {name: dtype.as_datatype_enum for name, dtype in types}
    for kernel in kernels_of(op_type):
        allowed = {one.name: set(one.allowed_values.list.type) for one in kernel.constraint}
        if all(value in allowed.get(name, {value}) for name, value in wanted.items()):
            return True
    return False
