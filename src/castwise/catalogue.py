"""The op catalogue: what each operation is, and how much rounding it can bear.

A format policy has to hold in every framework and on every device, so what it knows about operations is kept once,
as data (``catalogue.toml``), and front ends look ops up under their own framework's spelling. What the installed
libraries can compute is measured, not written by hand (``catalogue_kernels.toml``).

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
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any, TypeVar

from castwise._frozen import FrozenMap
from castwise.errors import CatalogueError, nearest

__all__ = [
    "DEVICE_KINDS",
    "EIGHT_BITS",
    "FRAMEWORKS",
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
    "parse_catalogue",
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
_HAZARDS = {"range": NARROW_RANGE, "mantissa": SHORT_MANTISSA}


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


_Choice = TypeVar("_Choice", bound=StrEnum)
_NONE: FrozenMap[str, Any] = FrozenMap()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry:
    """What the catalogue says of one op.

    Attributes:
        name: canonical name, torch-like snake_case; the name a policy's op rule uses.
        op_class: what kind of work it does.
        hazards: format name -> which of {"range", "mantissa"} endanger it there. A format without hazards is absent.
        rule: the default rule where class and hazards would mislead, else None.
        accumulates_wide: no running sum is carried in the format of the inputs. True where there is nothing to sum.
        selects: every output value is an input value, a constant or exact in any format: the op rounds nothing.
        mixed: how inputs of different floating formats are met under WIDEST.
        stores_constant: a Python number given to the op lands in its result (masked_fill, pad): it must fit the format.
        composite: holds products; a front end decides the ops inside instead of this one.
        names: framework -> spellings. torch: base names without namespace, overload or in-place underscore;
            jax: primitive names; tensorflow and onnx: op types.
        no_kernel: device kind ("cpu", "cuda") -> formats in which torch cannot compute the op forward and backward
            there, although it can in fp32.
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

    entries: Mapping[str, OpEntry]
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
        """Up to three canonical names or spellings closest to ``name``, for error messages."""
        known = set(self.entries).union(*self._by_spelling.values())
        return nearest(name, sorted(known))

    def of_class(self, op_class: OpClass) -> Iterator[OpEntry]:
        """The entries of one class, in the order of the file."""
        return (entry for entry in self.entries.values() if entry.op_class is op_class)


# ---- reading the data ----------------------------------------------------------------------------------------------

_SHARED_KEYS = frozenset({"class", "hazard", "rule", "accumulates_wide", "selects", "mixed", "composite", "stores_constant"})
_GROUP_KEYS = _SHARED_KEYS | {"why", "plain", "ops"}
_OP_KEYS = _SHARED_KEYS | {"note", *FRAMEWORKS}


def _fail(where: str, problem: str, remedy: str) -> CatalogueError:
    return CatalogueError(f"catalogue entry {where}: {problem}. {remedy}")


def _check_keys(where: str, table: Mapping[str, Any], allowed: frozenset[str]) -> None:
    for key in table:
        if key not in allowed:
            close = nearest(key, sorted(allowed), n=1) or sorted(allowed)
            raise _fail(where, f"unknown key {key!r}", f"Use {' or '.join(close)}.")


def _flag(where: str, table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise _fail(where, f"{key} is {value!r}", "Write true or false.")
    return value


def _member(where: str, key: str, kind: type[_Choice], value: object) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise _fail(where, f"{key} is {value!r}", f"Use one of {', '.join(kind)}.") from None


@functools.cache
def _hazards(where: str, text: str) -> Mapping[str, frozenset[str]]:
    """Expand "range mantissa" to format -> hazards."""
    by_format: dict[str, set[str]] = {}
    for hazard in text.split():
        if hazard not in _HAZARDS:
            raise _fail(where, f"unknown hazard {hazard!r}", f"Use {' or '.join(_HAZARDS)}.")
        for fmt in _HAZARDS[hazard]:
            by_format.setdefault(fmt, set()).add(hazard)
    return FrozenMap({fmt: frozenset(found) for fmt, found in by_format.items()})


def _spellings(where: str, name: str, op: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for framework in FRAMEWORKS:
        text = op.get(framework, name if framework == "torch" else "")
        if not isinstance(text, str):
            raise _fail(where, f"{framework} is {text!r}", "Write the spellings in one string, separated by spaces.")
        if text:
            names[framework] = tuple(text.split())
    if not names:
        raise _fail(where, "no framework spells it", "Add a spelling, or remove the entry.")
    return FrozenMap(names)


def _entry(name: str, op: Mapping[str, Any], group: Mapping[str, Any]) -> OpEntry:
    where = f"{name!r}"
    if not isinstance(op, Mapping):
        raise _fail(where, f"is {op!r}", "Write a table, {} where there is nothing to add.")
    _check_keys(where, op, _OP_KEYS)
    both = {**group, **op}
    rule = both.get("rule")
    return OpEntry(
        name=name,
        op_class=_member(where, "class", OpClass, both.get("class")),
        hazards=_hazards(where, both["hazard"]) if both.get("hazard") else _NONE,
        rule=None if rule is None else _member(where, "rule", Rule, rule),
        accumulates_wide=_flag(where, both, "accumulates_wide", True),
        selects=_flag(where, both, "selects", False),
        mixed=_member(where, "mixed", Mixed, both.get("mixed", Mixed.WIDEST)),
        composite=_flag(where, both, "composite", False),
        stores_constant=_flag(where, both, "stores_constant", False),
        names=_spellings(where, name, op),
        note=op.get("note", group.get("why", "")),
    )


def _group_entries(group: Mapping[str, Any]) -> Iterator[OpEntry]:
    ops = {name: {} for name in group.get("plain", "").split()} | group.get("ops", {})
    where = f"group of {next(iter(ops), 'no ops')!r}"
    _check_keys(where, group, _GROUP_KEYS)
    if not group.get("why"):
        raise _fail(where, "has no reason", "Say why its ops belong together in `why`.")
    return (_entry(name, op, group) for name, op in ops.items())


def parse_catalogue(text: str) -> Catalogue:
    """Read a catalogue from TOML text, in the layout that the head of ``catalogue.toml`` describes.

    Raises:
        CatalogueError: the text is not TOML, or an entry is not well formed; the message names the entry.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"The catalogue is not valid TOML: {error}. Correct that line.") from error
    entries: dict[str, OpEntry] = {}
    index: dict[str, dict[str, OpEntry]] = {framework: {} for framework in FRAMEWORKS}
    for group in data.get("group", []):
        for entry in _group_entries(group):
            if entry.name in entries:
                raise _fail(f"{entry.name!r}", "is defined twice", "Keep one of the two.")
            entries[entry.name] = entry
            for framework, spellings in entry.names.items():
                for spelling in spellings:
                    other = index[framework].setdefault(spelling, entry)
                    if other is not entry:
                        problem = f"{framework} spelling {spelling!r} also belongs to {other.name!r}"
                        raise _fail(f"{entry.name!r}", problem, "A spelling belongs to one entry: keep one of the two.")
    return Catalogue(FrozenMap(entries), FrozenMap(index))


@functools.cache
def load_catalogue() -> Catalogue:
    """The catalogue that ships with Castwise. Read on first use (tens of milliseconds), then kept."""
    return parse_catalogue(resources.files("castwise").joinpath("catalogue.toml").read_text(encoding="utf-8"))
