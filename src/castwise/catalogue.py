"""The op catalogue: what each operation is, and how much rounding it can bear.

A format policy has to hold in every framework and on every device, so what it knows about operations is kept once,
as data (``catalogue.toml``), and front ends look ops up under their own framework's spelling. Which 16-bit kernels
torch lacks is measured, not written by hand (``catalogue_kernels.toml``, by ``tools/generate_no_kernel.py``).

How an op's format follows from its entry, when no user rule says otherwise (``default_rule``):

1. An entry may name its rule outright, where class and hazards would mislead. Few do, each with its reason.
2. Products (matmul, conv, attention, rnn) run LOW: 16-bit hardware makes them faster, and it sums them in fp32. In 8
   bits only bare products do: a fused attention or recurrent kernel would carry its softmax or gates in 8 bits too.
3. An op with a hazard in the low format runs HIGH. Hazards differ by format. A *range* hazard (a square, a reciprocal,
   a long sum) can leave fp16 or fp8 at either end, but not bf16, which has the exponent of fp32. A *mantissa* hazard
   (a long sum's digits, a logarithm near 1, a loss, a position) wants more digits than any 16-bit format has.
4. Linear algebra and Fourier transforms run HIGH in every format.
5. Everything else runs in the WIDEST format among its floating inputs: it is bound by memory, so casting it costs what
   it would gain. What was low stays low, and fp32 is never rounded in passing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from castwise._frozen import FrozenMap
from castwise.errors import CatalogueError, nearest

__all__ = [
    "AS_WRITTEN",
    "DEVICE_KINDS",
    "EIGHT_BITS",
    "FRAMEWORKS",
    "HAZARDS",
    "NARROW_RANGE",
    "NO_ARITHMETIC",
    "PRODUCTS",
    "SHORT_MANTISSA",
    "Catalogue",
    "Mixed",
    "OpClass",
    "OpEntry",
    "Rule",
    "default_rule",
    "load_catalogue",
    "torch_base_name",
]

FRAMEWORKS = ("torch", "jax", "tensorflow", "onnx")
DEVICE_KINDS = ("cpu", "cuda")
EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")
# Formats whose exponent is shorter than fp32's, and formats whose mantissa is at most half of fp32's 23 bits: the ones
# that a range hazard and a mantissa hazard endanger. Spelt out to keep this module independent; a test compares them
# with formats.FORMATS.
NARROW_RANGE = ("fp16", *EIGHT_BITS)
SHORT_MANTISSA = ("tf32", "bf16", "fp16", *EIGHT_BITS)
HAZARDS = FrozenMap({"range": NARROW_RANGE, "mantissa": SHORT_MANTISSA})


class OpClass(StrEnum):
    """What kind of work an op does. A policy may give a rule to a whole class (``class:norm``)."""

    MATMUL = "matmul"
    CONV = "conv"
    ATTENTION = "attention"
    RNN = "rnn"
    ELEMENTWISE = "elementwise"
    EXP_LOG = "exp_log"
    REDUCTION = "reduction"
    NORM = "norm"
    LOSS = "loss"
    POOL = "pool"
    INTERPOLATE = "interpolate"
    INDEX = "index"
    VIEW = "view"
    COPY = "copy"
    CAST = "cast"
    COMPARE = "compare"
    INTEGER = "integer"
    RANDOM = "random"
    CREATE = "create"
    QUERY = "query"
    LINALG = "linalg"
    FFT = "fft"
    QUANTIZE = "quantize"
    CONTROL = "control"
    COMMUNICATION = "communication"


PRODUCTS = frozenset({OpClass.MATMUL, OpClass.CONV, OpClass.ATTENTION, OpClass.RNN})
# Products with other steps inside the same kernel: not bare enough for 8 bits.
_FUSED_PRODUCTS = frozenset({OpClass.ATTENTION, OpClass.RNN})
_ALWAYS_HIGH = frozenset({OpClass.LINALG, OpClass.FFT})
# Classes whose dtypes are a part of what was written: what the code asked for by dtype, and what moves no numbers.
AS_WRITTEN = frozenset(
    {
        OpClass.CAST,
        OpClass.QUANTIZE,
        OpClass.QUERY,
        OpClass.CREATE,
        OpClass.RANDOM,
        OpClass.CONTROL,
        OpClass.COMMUNICATION,
    }
)
# Classes whose formats are not a policy's to choose: their values come out as they went in, are no floating values, or
# have the format that the caller asked for.
NO_ARITHMETIC = frozenset(
    {
        OpClass.VIEW,
        OpClass.COPY,
        OpClass.CAST,
        OpClass.INDEX,
        OpClass.COMPARE,
        OpClass.INTEGER,
        OpClass.RANDOM,
        OpClass.CREATE,
        OpClass.QUERY,
        OpClass.CONTROL,
        OpClass.COMMUNICATION,
    }
)


class Rule(StrEnum):
    """Where an op computes: in the policy's low format, in fp32, or in the widest format among its inputs."""

    LOW = "low"
    HIGH = "high"
    WIDEST = "widest"


class Mixed(StrEnum):
    """How inputs of different floating formats are met when an op runs in the widest of them.

    WIDEST: the front end casts them to the widest. NATIVE: torch's kernel promotes by itself (JAX primitives and
    TensorFlow and ONNX ops never do: they need equal formats). KEEP: they differ on purpose and stay as they are.
    """

    WIDEST = "widest"
    NATIVE = "native"
    KEEP = "keep"


_NONE: FrozenMap[str, Any] = FrozenMap()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry:
    """What the catalogue says of one op.

    Attributes:
        name: canonical name, torch-like snake_case; the name a policy's op rule uses.
        op_class: what kind of work it does.
        hazards: format name -> which of {"range", "mantissa"} endanger it there. A format without hazards is absent.
        rule: the default rule where class and hazards would mislead, else None.
        accumulates_wide: no device's kernel carries a running sum in the format of the inputs. True where there is
            nothing to sum.
        selects: every output value is an input value, a constant or exact in any format: the op rounds nothing.
        mixed: how inputs of different floating formats are met under WIDEST.
        stores_constant: a Python number given to the op lands in its result (masked_fill, pad): it must fit the format.
        composite: holds products; a front end decides the ops inside instead of this one.
        names: framework -> spellings. torch: base names without namespace, overload or in-place underscore;
            jax: primitive names; tensorflow and onnx: op types.
        no_kernel: device kind ("cpu", "cuda") -> 16-bit formats in which torch cannot compute the op there, forward or
            backward, although it can in fp32.
        note: why the entry is as it is.
    """

    name: str
    op_class: OpClass
    hazards: Mapping[str, frozenset[str]] = _NONE
    rule: Rule | None = None
    accumulates_wide: bool = True
    selects: bool = False
    mixed: Mixed = Mixed.WIDEST
    composite: bool = False
    stores_constant: bool = False
    names: Mapping[str, tuple[str, ...]] = _NONE
    no_kernel: Mapping[str, tuple[str, ...]] = _NONE
    note: str = ""

    @property
    def view(self) -> bool:
        """Whether the op only looks at its input's bytes in another way, as reshape and transpose do."""
        return self.op_class is OpClass.VIEW

    @property
    def product(self) -> bool:
        """Whether the op is a product that 16-bit hardware makes faster."""
        return self.op_class in PRODUCTS

    @property
    def promotes(self) -> bool:
        """Whether its floating inputs must share a format, so that mixed ones go to the widest of them."""
        return self.mixed is not Mixed.KEEP

    def promotes_natively(self, framework: str) -> bool:
        """Whether the framework's own kernel takes mixed formats and computes in the widest: no cast is needed."""
        return framework == "torch" and self.mixed is Mixed.NATIVE

    def lacks_kernel(self, fmt: str, device_kind: str) -> bool:
        """Whether torch has no kernel for this op in ``fmt`` ("fp16", "bf16") on "cpu" or "cuda"."""
        return fmt in self.no_kernel.get(device_kind, ())


def default_rule(entry: OpEntry, fmt: str) -> Rule:
    """The rule for an op when the low format is ``fmt`` and the user says nothing about it.

    Args:
        entry: the op's catalogue entry.
        fmt: canonical name of the low format, as in ``castwise.formats`` ("bf16", "fp16", "fp8_e4m3", ...).

    The module's docstring explains the order of the decisions.
    """
    if entry.rule is not None:
        return entry.rule
    if entry.op_class in _FUSED_PRODUCTS and fmt in EIGHT_BITS:
        return Rule.HIGH
    if entry.op_class in PRODUCTS:
        return Rule.LOW
    if entry.hazards.get(fmt) or entry.op_class in _ALWAYS_HIGH:
        return Rule.HIGH
    return Rule.WIDEST


# Namespaces whose name is part of the op's aten name: torch.linalg.norm is aten::linalg_norm.
_JOINED_NAMESPACE = re.compile(r"^(linalg|fft|special|sparse|masked|signal\.windows)\.")
_DROPPED_NAMESPACE = re.compile(
    r"^(aten::|torch\.|ops\.aten\.|_C\._nn\.|_VF\.|Tensor\.|nn\.functional\.|functional\.|nn\.init\.)+"
)
# Backward ops that aten spells after their forward, and no entry of their own: convolution_backward, gelu_backward.
_BACKWARD = re.compile(r"(_double)?_backward$")


def torch_base_name(name: str) -> str:
    """The catalogue's spelling of a torch op: no namespace, overload or in-place underscore.

    >>> torch_base_name("aten::sum.dim_IntList"), torch_base_name("torch.linalg.norm"), torch_base_name("add_")
    ('sum', 'linalg_norm', 'add')
    """
    name = _DROPPED_NAMESPACE.sub("", name)
    name = _JOINED_NAMESPACE.sub(lambda match: match[1].replace(".", "_") + "_", name)
    name = name.partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All entries, and an index of them by each framework's spelling. Immutable; see ``load_catalogue``."""

    entries: Mapping[str, OpEntry] = field(repr=False)
    _by_spelling: Mapping[str, Mapping[str, OpEntry]] = field(repr=False)
    kernels_measured_with: str = ""

    def lookup(self, framework: str, name: str) -> OpEntry | None:
        """The entry of an op as ``framework`` ("torch", "jax", "tensorflow", "onnx") spells it, or None.

        A torch name may be qualified, overloaded or in-place (``aten::add_.Tensor``); the op ``x_backward`` answers
        with the entry of ``x`` unless it has its own: a gradient is as sensitive as what it is the gradient of.
        """
        if framework not in self._by_spelling:
            raise CatalogueError(f"Unknown framework {framework!r}: use one of {', '.join(FRAMEWORKS)}.")
        spelt = self._by_spelling[framework]
        found = spelt.get(name)
        if found is not None or framework != "torch":
            return found
        base = torch_base_name(name)
        found = spelt.get(base)
        if found is None and base.endswith("_backward"):
            forward = _BACKWARD.sub("", base)
            found = spelt.get(forward) or spelt.get(forward.removeprefix("_"))
        return found

    def suggest(self, name: str) -> list[str]:
        """Up to three canonical names closest to ``name``, by themselves or by a framework's spelling, best first."""
        spelt = {spelling: entry for by in self._by_spelling.values() for spelling, entry in by.items()}
        close = nearest(name, self.entries) + [spelt[spelling].name for spelling in nearest(name, spelt)]
        return list(dict.fromkeys(close))[:3]

    def of_class(self, op_class: OpClass) -> Iterator[OpEntry]:
        """The entries of one class, in the order of the file."""
        return (entry for entry in self.entries.values() if entry.op_class is op_class)


@functools.cache
def load_catalogue() -> Catalogue:
    """The catalogue that ships with Castwise. Read on first use (tens of milliseconds), then kept."""
    from castwise._catalogue_data import read_catalogue  # it builds this module's types

    return read_catalogue()
