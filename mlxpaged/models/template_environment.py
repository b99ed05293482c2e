"""Jinja's sandbox, with the limits of `template_limits`. The tokenizer makes transformers use it."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import meta
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.nodes import (
    Add,
    Concat,
    Dict,
    EvalContextModifier,
    Expr,
    Getitem,
    Impossible,
    List,
    Node,
    Slice,
    Tuple,
)
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxpaged.models.template_limits import (
    FILTERS,
    METHODS,
    REFERENCE,
    Budget,
    TemplateLimitError,
    check_form,
    check_join,
    check_percent,
)

MAX_SOURCE = 2**18
"""Characters of a template. Those of known models have some thousand."""
GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
"""Tags of transformers around answers."""
TERMS = 8
"""Terms of a sum that are added before the sum is checked."""

TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
DICT_METHODS = frozenset({"get", "items", "keys", "values", "copy"})
"""Methods of texts and dictionaries that the sandbox hands out as they are."""
DICT_NAMES = frozenset(dir(dict))

LOOKUPS = frozenset({"startswith", "endswith", "find", "index", "count", "get", "items", "keys", "values"})
"""Methods that make nothing."""

FREE = frozenset({"length", "count", "default", "d", "first", "last", "abs", "float"})
"""Filters that make nothing."""


class Current(threading.local):
    """The budget of the rendering that runs on this thread."""

    budget: Budget


current = Current()


def limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with a budget of its own."""

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        current.budget = Budget()
        try:
            return function(*args, **named)
        finally:
            del current.budget

    return run


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends of the budget. Jinja passes some filters the context or environment first."""
    first = int(hasattr(function, "jinja_pass_arg"))
    estimate = FILTERS.get(name)

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        budget = current.budget
        value = args[first]
        if type(value) is not str:
            budget.weigh(value)
        if estimate is not None:
            estimate(budget, value, (*args[first + 1 :], *named.values()) if named else args[first + 1 :])
        elif name == "join":
            value = check_join(budget, value, max((*args[first + 1 :], *named.values(), ""), key=budget.weigh))
            args = (*args[:first], value, *args[first + 1 :])
        elif name == "format":
            check_percent(budget, str(value), named or args[first + 1 :])
        return budget.made(function(*args, **named))

    return run


class LimitedCode(CodeGenerator):
    """Python code that spends of `budget` wherever a template makes values or goes on."""

    def write_commons(self) -> None:
        """The first lines of the functions for the template and its blocks."""
        super().write_commons()
        self.writeline("budget = environment.budget")
        self.writeline("str = budget.text")

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        """The body of a loop, macro, condition or block."""
        self.writeline("budget.steps -= 1")
        self.writeline("if budget.steps < 0: budget.look()")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: Add, frame: Frame, terms: int = 0) -> None:  # type: ignore[override]
        """Jinja adds two values. A sum of several is checked once."""
        checked = terms % TERMS == 0
        self.write("budget.made(" if checked else "(")
        if isinstance(node.left, Add):
            self.visit_Add(node.left, frame, terms + 1)
        else:
            self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("budget.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: Getitem, frame: Frame) -> None:
        self._visit_made(super().visit_Getitem, node, frame, isinstance(node.arg, Slice))

    def visit_List(self, node: List, frame: Frame) -> None:
        self._visit_made(super().visit_List, node, frame, not is_constant(node, frame))

    def visit_Dict(self, node: Dict, frame: Frame) -> None:
        self._visit_made(super().visit_Dict, node, frame, not is_constant(node, frame))

    def visit_Tuple(self, node: Tuple, frame: Frame) -> None:
        is_value = node.ctx == "load"  # or else the target of an assignment
        self._visit_made(super().visit_Tuple, node, frame, is_value and not is_constant(node, frame))

    def _visit_made(self, visit: Callable[[Any, Frame], None], node: Expr, frame: Frame, makes: bool) -> None:
        if makes:
            self.write("budget.made(")
        visit(node, frame)
        if makes:
            self.write(")")

    def visit_EvalContextModifier(self, node: EvalContextModifier, frame: Frame) -> None:
        """With `autoescape`, values become text in other ways."""
        raise TemplateLimitError("it uses autoescape, which is not supported")

    visit_ScopedEvalContextModifier = visit_EvalContextModifier


def is_constant(node: Expr, frame: Frame) -> bool:
    """Constants are limited by the length of the template."""
    try:
        node.as_const(frame.eval_ctx)
    except Impossible:
        return False
    return True


class Unknown(dict[str, Any]):
    """Filters that compute nothing."""

    def get(self, name: str, default: Any = None) -> Any:
        def compute(*args: Any, **named: Any) -> Any:
            raise Impossible

        return compute


def variables_of(source: str) -> frozenset[str]:
    """Returns the names that a chat template looks up and does not set itself. Raises jinja2's errors for a text that
    is no template. Filters are not computed, as a compilation would do with constants."""
    if len(source) > MAX_SOURCE:
        return frozenset()
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    environment.filters = Unknown()
    environment.intercepted_binops = LimitedEnvironment.intercepted_binops
    return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION.sub("", source))))


class LimitedTemplate(Template):
    """A template each of whose renderings has a budget."""

    render = limited(Template.render)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Each method that the code of a template calls may raise TemplateLimitError."""

    code_generator_class = LimitedCode
    template_class = LimitedTemplate
    intercepted_binops = frozenset({"+", "*", "**", "%", "/", "//"})

    def from_string(self, source: Any, *args: Any, **named: Any) -> Template:
        """Compile a template. Jinja computes constants meanwhile, so there is a budget too."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has more than {MAX_SOURCE:,} characters")
        self.globals.pop("lipsum", None)
        for name in set(self.filters) - FREE:
            self.filters[name] = limited_filter(name, self.filters[name])
        compiled: Template = limited(super().from_string)(source, *args, **named)
        return compiled

    @property
    def budget(self) -> Budget:
        return current.budget

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox. The usual cases come first, which saves more time than the limits take."""
        kind = type(obj)
        if kind is dict:
            if attribute in DICT_METHODS:
                return getattr(obj, attribute)
            if attribute not in DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str and attribute in TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def concat(self, texts: Iterable[str]) -> str:
        """The output of a template, macro or block."""
        pieces = list(texts)
        size = sum(map(len, pieces))
        budget = current.budget
        budget.check(size)
        budget.spend(size)
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every operator in `intercepted_binops` but `+`."""
        budget = current.budget
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            budget.check_bits(bits * max(right, 0) if operator == "**" else bits + right.bit_length())
        elif operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int):
                    items = REFERENCE * len(value) if isinstance(value, (list, tuple)) else 0
                    budget.check(times * max(items, budget.weigh(value)))
        elif operator == "%" and isinstance(left, str):
            check_percent(budget, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """A call of a method, a macro or a global function."""
        budget = current.budget
        budget.steps -= 1
        if budget.steps < 0:
            budget.look()
        if type(function) is BuiltinMethodType:  # of a text, a list or a dictionary: nothing that the sandbox refuses
            if named:
                named.pop("_loop_vars", None)  # for functions that take Jinja's context
                named.pop("_block_vars", None)
            name, owner = function.__name__, function.__self__
            if name in LOOKUPS:
                return function(*args, **named)
            if isinstance(owner, (str, bytes, int)):
                args = before_method(budget, name, owner, args, named)
            return budget.made(function(*args, **named))
        given = {name: value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")}
        for value in (*args, *given.values()):  # a macro can make a tuple of them
            if isinstance(value, (list, tuple, dict)):
                budget.weigh(value)
        if isinstance(function, (FunctionType, MethodType)):
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str):
                args = before_method(budget, method.__name__, owner, args, given)
            elif function.__name__ in ("strftime_now", "raise_exception"):
                check_form("".join(map(budget.text, args)))
        return budget.made(super().call(context, function, *args, **named))


def before_method(budget: Budget, name: str, owner: Any, args: tuple[Any, ...], named: Any) -> tuple[Any, ...]:
    """Checks a call of a method, and returns its arguments. Raises TemplateLimitError."""
    estimate = METHODS.get(name)
    if estimate is not None:
        estimate(budget, owner, (*args, *named.values()) if named else args)
    elif name == "join" and args:
        return (check_join(budget, args[0], owner),)
    return args
