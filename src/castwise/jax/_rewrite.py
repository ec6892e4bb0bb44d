"""One jaxpr into another that computes in the formats a policy decides.

The alternative, an interpreter that casts while it binds one primitive after another, has to be traced again, loses
track inside every primitive that holds a jaxpr, and is slow: the caches that make JAX trace a layer once do not see it.
Here a jaxpr is rewritten as data: each equation is copied with its inputs cast and its results retyped, and jaxprs
inside equations (in ``_control.py``) are rewritten the same way, once for each set of input dtypes. Nothing is traced,
so it costs a fraction of what tracing the function did, and names, scopes, source lines and shardings stay where they
were.

A variable of the old jaxpr becomes a ``Value``: the same number in one or more dtypes, so that no cast is made twice.
"""

from __future__ import annotations

import bisect
import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from castwise.policy import Rule

from ._dtypes import CASTABLE, FP32, DType, fits, float_dtype, left_alone, saturated, widest
from ._layers import in_region, layer_path
from ._params import holds_program, params_for, passes_through
from ._rules import Choice, Chooser, contraction_length, demands
from ._values import BROADCAST, CONVERT, InType, Record, Rewritten, Value, coerced, literal, retyped

__all__ = ["Body", "Rewriter"]


# Paths of derivative rules, which no plan has: a plan is for what the function computes.
_DERIVATIVE = re.compile("/(fwd|bwd|jvp|vmap)/")
_AS_WRITTEN = Choice("", None)
_told: set[str] = set()  # primitives whose programs were said to stay as they are

log = logging.getLogger("castwise.jax")


class Rewriter:
    """Rewrites jaxprs by the choices of one policy or plan. Keeps what it has rewritten as long as the original lives.

    Args:
        choose: the choice for a primitive in a layer.
        layered: whether layers matter to ``choose``; if not, a jaxpr is rewritten once wherever it is used.
        records: a list that receives a ``Record`` of each equation; it turns keeping off.
        castable: dtypes that may be changed.
        planned: choices for single equations, by path; ``choose`` is asked for the others.
        wide: the widest dtype of ``castable``.
        rules: beside ``planned``, choices for the derivative rules of functions in which something is planned low.
    """

    def __init__(
        self,
        choose: Chooser,
        *,
        layered: bool = False,
        records: list[Record] | None = None,
        castable: frozenset[DType] = CASTABLE,
        planned: Mapping[str, Choice] | None = None,
        wide: DType = FP32,
        rules: Chooser | None = None,
    ) -> None:
        self._choose = choose
        self.layered = layered or records is not None
        self.records = records
        self.castable, self.wide = castable, wide
        self.follows_plan = planned is not None
        self._planned, self._rules = planned or {}, rules
        self._paths = sorted(self._planned)
        from ._control import HANDLERS  # it needs this module's classes

        self.handlers = HANDLERS
        self._kept: weakref.WeakKeyDictionary[Jaxpr, dict[Any, Rewritten]] = weakref.WeakKeyDictionary()
        self._whole: weakref.WeakKeyDictionary[Jaxpr, Jaxpr] = weakref.WeakKeyDictionary()
        self._closed: weakref.WeakKeyDictionary[Jaxpr, ClosedJaxpr] = weakref.WeakKeyDictionary()

    def choice(self, primitive: str, layer: str, path: str) -> Choice:
        """How the equation at ``path`` is computed."""
        found = self._planned.get(path)
        if found is not None:
            return found
        derivative = _DERIVATIVE.search(path)
        if self._rules is not None and derivative is not None and self._low_under(path[: derivative.start()] + "/"):
            return self._rules(primitive, layer)
        return self._choose(primitive, layer)

    def _low_under(self, path: str) -> bool:
        return any(choice.rule is Rule.LOW for _, choice in self._planned_under(path))

    def _planned_under(self, path: str) -> tuple[tuple[str, Choice], ...]:
        """What is planned for the equations inside the one at ``path``: two calls of one jaxpr may differ in it."""
        derivative = _DERIVATIVE.search(path)
        if derivative is not None:  # a rule of its own, which follows what was planned for the function
            return (("low", _AS_WRITTEN),) if self._low_under(path[: derivative.start()] + "/") else ()
        first = bisect.bisect_left(self._paths, path)
        last = bisect.bisect_left(self._paths, path + "\U0010ffff")
        return tuple((name[len(path) :], self._planned[name]) for name in self._paths[first:last])

    def castable_dtype(self, aval: Any) -> DType | None:
        """The dtype of an abstract value if it may be changed."""
        dtype = float_dtype(aval)
        return dtype if dtype in self.castable else None

    def jaxpr(self, jaxpr: Jaxpr, types: Sequence[InType], layer: str = "", path: str = "") -> Rewritten:
        """``jaxpr`` for inputs of other dtypes. Its constants keep theirs; its results have whatever dtype they get."""
        if self.records is not None:
            return Body(self, jaxpr, types, layer, path).rewritten()
        kept = self._kept.setdefault(jaxpr, {})
        key = (tuple(types), layer if self.layered else "", self._planned_under(path) if self._planned else ())
        found = kept.get(key)
        if found is None:
            found = kept[key] = Body(self, jaxpr, types, layer, path).rewritten()
        return found

    def whole(self, jaxpr: Jaxpr) -> Jaxpr:
        """``jaxpr`` with the same inputs and results as before, and other formats inside."""
        found = self._whole.get(jaxpr)
        if found is None:
            types = [InType(self.castable_dtype(var.aval)) for var in jaxpr.invars]
            done = self.jaxpr(jaxpr, types)
            found = coerced(done, [self.castable_dtype(var.aval) for var in jaxpr.outvars], jaxpr.outvars)
            self._whole[jaxpr] = found
        return found

    def closed(self, written: ClosedJaxpr) -> ClosedJaxpr:
        """As ``whole``, with the constants: one object for one that was given, by which JAX finds what it compiled."""
        made = self._closed.get(written.jaxpr)
        if made is None or any(a is not b for a, b in zip(made.consts, written.consts, strict=True)):
            made = self._closed[written.jaxpr] = ClosedJaxpr(self.whole(written.jaxpr), written.consts)
        return made


class Body:
    """The rewriting of one jaxpr, while it goes on."""

    def __init__(self, rewriter: Rewriter, old: Jaxpr, types: Sequence[InType], layer: str, path: str) -> None:
        self.rewriter = rewriter
        self.old = old
        self.layer = layer
        self.path = path
        self.eqns: list[JaxprEqn] = []
        self._env: dict[Var, Value] = {}
        self._input_of: dict[Any, Any] = {}  # old input -> new, for effects that name their variable
        self.constvars = [self._input(var, InType(rewriter.castable_dtype(var.aval))) for var in old.constvars]
        self.invars = [self._input(var, type_) for var, type_ in zip(old.invars, types, strict=True)]

    def _input(self, old: Var, type_: InType) -> Var:
        aval = old.aval if type_.dtype is None else retyped(old.aval, type_.dtype)
        new = Var(aval, old.initial_qdd, old.final_qdd)
        self._env[old] = Value(new, type_.dtype, type_.constant)
        self._input_of[old] = new
        return new

    def rewritten(self) -> Rewritten:
        """Rewrite all equations."""
        choice, layer = self.rewriter.choice, self.layer
        needs_layer = self.rewriter.layered
        for index, eqn in enumerate(self.old.eqns):
            stack = eqn.source_info.name_stack
            if stack.stack and in_region(stack.stack):
                self.as_written(eqn)
                continue
            if needs_layer:
                layer = layer_path(self.layer, stack)
            path = f"{self.path}{index}"
            handler = self.rewriter.handlers.get(eqn.primitive.name)
            if handler is not None:
                handler(self, eqn, layer, path)
                continue
            self.plain(eqn, choice(eqn.primitive.name, layer, path), layer, path)
        outs = [self.read(var) for var in self.old.outvars]
        jaxpr = Jaxpr(
            self.constvars,
            self.invars,
            [value.atom for value in outs],
            self.eqns,
            self._effects(self.old.effects),
            self.old.debug_info,
            self.old.is_high,
        )
        return Rewritten(jaxpr, tuple(value.dtype for value in outs))

    # ---- values ----

    def read(self, atom: Any) -> Value:
        """What a variable or literal of the old jaxpr is now."""
        if type(atom) is Literal:
            dtype = self.rewriter.castable_dtype(atom.aval)
            constant = float(atom.val) if dtype is not None and not np.shape(atom.val) else None
            return Value(atom, dtype, constant)
        return self._env[atom]

    def write(self, old: Var, value: Value) -> None:
        """Say what an old variable has become."""
        self._env[old] = value

    def new_var(self, aval: Any, dtype: DType | None) -> Var:
        """A new variable like ``aval``, in ``dtype`` where that is given."""
        return Var(aval if dtype is None else retyped(aval, dtype))

    def cast(self, value: Value, dtype: DType | None, eqn: JaxprEqn) -> Any:
        """The atom of a value in ``dtype`` (None: as it is). A cast that was made before is used again."""
        if dtype is None or value.dtype is None or value.dtype == dtype:
            return value.atom
        if value.casts is None:
            value.casts = {}
        made = value.casts.get(dtype)
        if made is None:
            made = value.casts[dtype] = self._cast(value, dtype, eqn)
        return made

    def _cast(self, value: Value, dtype: DType, eqn: JaxprEqn) -> Any:
        aval = retyped(value.atom.aval, dtype)
        if value.constant is None:
            return self._emit_new(eqn, CONVERT, [value.atom], aval, new_dtype=dtype, weak_type=False, sharding=None)
        constant = saturated(value.constant, dtype)
        scalar = literal(np.asarray(constant, dtype)[()], ShapedArray((), dtype))
        if not aval.shape:
            return scalar
        shape = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
        return self._emit_new(eqn, BROADCAST, [scalar], aval, **shape)

    def _emit_new(self, eqn: JaxprEqn, primitive: Primitive, atoms: list[Any], aval: Any, **params: Any) -> Var:
        out = Var(aval)
        self.eqns.append(
            eqn.replace(invars=atoms, outvars=[out], primitive=primitive, params=params, effects=frozenset())
        )
        return out

    # ---- equations ----

    def emit(
        self, eqn: JaxprEqn, atoms: list[Any], dtypes: Sequence[DType | None], params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Add an equation like ``eqn`` with other inputs; ``dtypes`` are its results', which are returned as values."""
        values = []
        for old, dtype in zip(eqn.outvars, dtypes, strict=True):
            value = Value(self.new_var(old.aval, dtype), dtype)
            self._env[old] = value
            values.append(value)
        self.eqns.append(
            eqn.replace(
                invars=atoms,
                outvars=[value.atom for value in values],
                params=eqn.params if params is None else params,
                effects=self._effects(eqn.effects),
            )
        )
        return values

    def as_written(self, eqn: JaxprEqn, params: dict[str, Any] | None = None) -> list[Value]:
        """Add an equation with the dtypes that it was written with."""
        atoms = [self.cast(self.read(var), self.rewriter.castable_dtype(var.aval), eqn) for var in eqn.invars]
        return self.emit(eqn, atoms, [self.rewriter.castable_dtype(var.aval) for var in eqn.outvars], params)

    def plain(self, eqn: JaxprEqn, choice: Choice, layer: str, path: str) -> None:
        """Add an equation that holds no jaxpr of its own, in the dtype that its choice asks for."""
        before = len(self.eqns)
        values = [self.read(var) for var in eqn.invars]
        floats = [value for value in values if value.dtype is not None]
        if eqn.primitive is CONVERT:
            self._convert(eqn, values[0])
        elif holds_program(eqn.params):
            self._unseen(eqn, layer, path)
            self.as_written(eqn)
        elif choice.rule is None or not floats:
            self.as_written(eqn)
        elif choice.rule is Rule.WIDEST and passes_through(eqn):
            self.emit(eqn, [value.atom for value in values], [value.dtype for value in values])
        else:
            choice = self._on_its_merits(eqn, choice)
            self._arithmetic(eqn, choice, values, floats)
        if self.rewriter.records is not None:
            self.record(eqn, choice, layer, path, floats, before)

    def _unseen(self, eqn: JaxprEqn, layer: str, path: str) -> None:
        """Say once that a program inside an equation, such as a kernel's, stays wide where products would be low."""
        name = eqn.primitive.name
        products = self.rewriter.choice("dot_general", layer, path)
        if name not in _told and not self.rewriter.follows_plan and products.rule is Rule.LOW:
            _told.add(name)
            log.warning(
                "%s holds a program that autocast does not look into: it is computed in the formats it was written in. "
                "Give it 16-bit arrays where it should compute in 16 bits.",
                name,
            )

    def _on_its_merits(self, eqn: JaxprEqn, choice: Choice) -> Choice:
        """The choice, once it is seen that a product asks for its precision, has nothing to sum, or is not all ours."""
        if "preferred_element_type" not in eqn.params:
            return choice
        demand = demands(eqn.params) or left_alone(eqn, self.rewriter.castable)
        if demand:
            return replace(choice, rule=None, reason=demand)
        if choice.rule is Rule.LOW:
            shapes = [getattr(var.aval, "shape", ()) for var in eqn.invars]
            if contraction_length(eqn.primitive.name, eqn.params, shapes) == 1:
                return replace(
                    choice, rule=Rule.WIDEST, reason="it sums a single term: nothing to gain, digits to lose"
                )
        return choice

    def _arithmetic(self, eqn: JaxprEqn, choice: Choice, values: list[Value], floats: list[Value]) -> None:
        if choice.rule is None:
            self.as_written(eqn)
            return
        dtype = choice.dtype if choice.rule is not Rule.WIDEST else self._widest(choice, floats)
        assert dtype is not None
        atoms = [self.cast(value, dtype, eqn) for value in values]
        params, result = params_for(eqn, dtype, choice, self.rewriter.castable)
        castable = self.rewriter.castable_dtype
        results = self.emit(eqn, atoms, [result if castable(var.aval) else None for var in eqn.outvars], params)
        if choice.view and len(values) == 1:
            results[0].constant = values[0].constant
        if choice.rounds is not None:
            self._env[eqn.outvars[0]] = Value(self.cast(results[0], choice.rounds, eqn), choice.rounds)

    def _widest(self, choice: Choice, floats: list[Value]) -> DType:
        """The widest dtype among the inputs. Constants follow the others, unless they would not survive that."""
        strong = {value.dtype for value in floats if value.constant is None and value.dtype is not None}
        dtype = widest(strong or {value.dtype for value in floats if value.dtype is not None})
        if strong and not choice.stores_constant:
            for value in floats:
                if value.constant is not None and not fits(value.constant, dtype):
                    return widest([dtype, self.rewriter.wide])
        return dtype

    def _convert(self, eqn: JaxprEqn, value: Value) -> None:
        """A conversion that the user wrote is kept, one that only changed weak types passes its input on."""
        old, new = self.rewriter.castable_dtype(eqn.invars[0].aval), self.rewriter.castable_dtype(eqn.outvars[0].aval)
        if value.dtype is not None and new is not None and (old == new or value.dtype == new):
            self.write(eqn.outvars[0], value)
            return
        converted = self.emit(eqn, [value.atom], [new])[0]
        converted.constant = value.constant

    # ---- bookkeeping ----

    def record(
        self, eqn: JaxprEqn, choice: Choice, layer: str, path: str, floats: Sequence[Value], before: int
    ) -> None:
        """Tell the rewriter's list what became of an equation, the last one added."""
        if self.rewriter.records is None:
            return
        castable = self.rewriter.castable_dtype
        emitted = self.eqns[-1] if len(self.eqns) > before else eqn
        self.rewriter.records.append(
            Record(
                path,
                layer,
                eqn.primitive.name,
                choice,
                tuple(value.dtype for value in floats if value.dtype is not None),
                tuple(dtype for var in emitted.invars if (dtype := castable(var.aval)) is not None),
                tuple(dtype for var in eqn.outvars if (dtype := self.read(var).dtype) is not None),
                sum(made.primitive is CONVERT for made in self.eqns[before:-1]),
                tuple(tuple(getattr(var.aval, "shape", ())) for var in eqn.invars),
            )
        )

    def _effects(self, effects: Any) -> Any:
        """Effects that name a variable (a read or write of mutable memory) name the new one."""
        if not any(hasattr(effect, "input") for effect in effects):
            return effects
        return {self._effect(effect) for effect in effects}

    def _effect(self, effect: Any) -> Any:
        if not hasattr(effect, "input") or isinstance(effect.input, int):
            return effect
        return effect.replace(self._env[effect.input].atom)
