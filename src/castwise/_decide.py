"""The one function that decides in which format an op is computed, from a policy and the op's catalogue entry.

Every front end and the planner call ``decide``; none has rules of its own. What the user wrote comes first, then the
catalogue. Of several things that speak about an op, the first of these decides:

1. layer rules that cover the op's layer, the last one first: what the rule's ``ops`` say of the op by name, then by
   class; then its ``format``: a wide one (32 bits or more) settles the op, a narrow one replaces the policy's format
   for what follows;
2. the policy's ``ops``: by name, then by class;
3. the policy's ``format`` where it is wide: all arithmetic is done in it;
4. the catalogue, through its ``default_rule``.

Then a format for which the device has no kernel at all (as the catalogue knows it) is widened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from castwise import _globs
from castwise.catalogue import NO_ARITHMETIC, OpEntry, Rule, default_rule
from castwise.errors import PolicyError
from castwise.formats import FP32, NumberFormat, parse_format, widest

if TYPE_CHECKING:
    from castwise.policy import Policy

__all__ = ["Decision", "decide", "is_wide"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one op is computed, and why.

    Attributes:
        rule: what happens to the op's inputs.
        fmt: the format they are brought to; ``None`` with ``Rule.WIDEST``, where the inputs themselves decide.
        reason: the policy key, op class or hazard that decided, in words.
    """

    rule: Rule
    fmt: NumberFormat | None
    reason: str


def is_wide(fmt: NumberFormat) -> bool:
    """Whether ``fmt`` keeps all that float32 keeps (float32, float64). TF32 is stored in 32 bits but rounds."""
    return fmt.holds(FP32)


def decide(policy: Policy, entry: OpEntry | None, *, layer: str = "", name: str = "", kind: str = "") -> Decision:
    """Decide the format of one op.

    Args:
        policy: a resolved policy (``policy.resolve(device)``).
        entry: the op's catalogue entry; ``None`` for an op that the catalogue does not know.
        layer: path of the module whose forward runs the op (``"encoder.layers.3.mlp"``); ``""`` is the model itself.
        name: the framework's or user's own name of the op, by which rules for custom ops (``"mylib::my_op"``) find it.
        kind: the device's kind (``"cpu"``, ``"cuda"``, …), to widen formats for which it has no kernel; ``""`` to
            leave that out, as emulation does, which computes in float32 anyway.

    Returns:
        The decision, with its reason.

    Raises:
        PolicyError: the policy's format is still ``"auto"``.
    """
    if policy.format == "auto":
        raise PolicyError(
            "format: 'auto' is not a format yet. Call policy.resolve(device) first, for example "
            "policy.resolve(castwise.detect())."
        )
    covering = [index for index, rule in enumerate(policy.layers) if _globs.covers(rule.match, layer)]
    low, narrow_rule = _low_format(policy, covering)
    decision = _by_rules(policy, entry, name, covering, low, narrow_rule)
    return _with_kernel(decision, entry, low, policy.high_format, kind) if kind and entry is not None else decision


def _low_format(policy: Policy, covering: list[int]) -> tuple[NumberFormat, int]:
    """What "low" means here, and the layer rule that says so: the last narrow one, else -1 for the policy itself."""
    for index in reversed(covering):
        spelling = policy.layers[index].format
        if spelling is not None and not is_wide(fmt := parse_format(spelling)):
            return fmt, index
    return parse_format(policy.format), -1


def _by_rules(
    policy: Policy, entry: OpEntry | None, name: str, covering: list[int], low: NumberFormat, narrow_rule: int
) -> Decision:
    high = policy.high_format
    for index in reversed(covering):
        rule = policy.layers[index]
        where = f"layers[{index}] ({rule.match!r})"
        if found := _setting(rule.ops, entry, name):
            return _as_written(found, low, high, where + ".")
        if rule.format is not None and index > narrow_rule:
            return _all_wide(entry, widest(parse_format(rule.format), high), f"{where}.format = {rule.format!r}")
    if found := _setting(policy.ops, entry, name):
        return _as_written(found, low, high, "")
    if is_wide(low):
        return _all_wide(entry, high, f"format = {policy.format!r}")
    return _by_catalogue(entry, low, high)


def _setting(ops: Mapping[str, str], entry: OpEntry | None, name: str) -> tuple[str, str] | None:
    """The key and value of ``ops`` that speak about this op, if any: a name is more specific than a class."""
    keys = [name] if entry is None else [entry.name, name, f"class:{entry.op_class.value}"]
    return next(((key, ops[key]) for key in keys if key and key in ops), None)


def _as_written(found: tuple[str, str], low: NumberFormat, high: NumberFormat, where: str) -> Decision:
    key, setting = found
    reason = f"{where}ops[{key!r}] = {setting!r}"
    if setting == Rule.WIDEST:
        return Decision(Rule.WIDEST, None, reason)
    if setting == Rule.LOW:
        return Decision(Rule.LOW, low, f"{reason}, which here is {low.long_name}")
    fmt = high if setting == Rule.HIGH else parse_format(setting)
    return Decision(Rule.HIGH if is_wide(fmt) else Rule.LOW, fmt, reason)


def _all_wide(entry: OpEntry | None, fmt: NumberFormat, reason: str) -> Decision:
    """Inside a wide format all arithmetic is done in it; what only moves values, and what is unknown, is left alone."""
    if entry is None:
        return Decision(Rule.WIDEST, None, f"{reason}, and the op is not in the catalogue")
    if entry.op_class in NO_ARITHMETIC or entry.selects:
        return Decision(Rule.WIDEST, None, f"{reason}, and class {entry.op_class.value} does no arithmetic")
    return Decision(Rule.HIGH, fmt, reason)


def _by_catalogue(entry: OpEntry | None, low: NumberFormat, high: NumberFormat) -> Decision:
    if entry is None:
        return Decision(Rule.WIDEST, None, "not in the catalogue: inputs are only brought to the widest among them")
    kind = entry.op_class.value
    rule = default_rule(entry, low.name)
    if rule is Rule.LOW:
        return Decision(rule, low, f"class {kind} runs low, in {low.long_name}")
    hazards = sorted(entry.hazards.get(low.name, ()))
    danger = f"{' and '.join(hazards)} hazard in {low.long_name}"
    if rule is Rule.WIDEST:
        return Decision(
            rule, None, f"class {kind} follows its inputs" + (f", in spite of a {danger}" if hazards else "")
        )
    return Decision(rule, high, f"class {kind}: {danger}" if hazards else f"class {kind} stays wide")


def _with_kernel(decision: Decision, entry: OpEntry, low: NumberFormat, high: NumberFormat, kind: str) -> Decision:
    """Widen what the device cannot run. An op that follows its inputs may well be handed ``low`` ones."""
    fmt = decision.fmt or low
    if not entry.lacks_kernel(fmt.name, kind):
        return decision
    reason = f"no {fmt.long_name} kernel for {entry.name} on {kind} (otherwise: {decision.reason})"
    return Decision(Rule.HIGH, high, reason)
