"""Where clang's C++ for OpenCL and Metal differ, settled on the tokens of a kernel's source.

`check` rejects what clang would accept and Metal does not; `rewrite` turns what Metal accepts and clang
does not into something it does. Line numbers stay as they are. Everything else (types, address spaces,
overloads) is clang's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
      | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\[\[|\]\]|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCALARS = _words(
    """
    bool char uchar short ushort int uint long ulong half bfloat float size_t ptrdiff_t signed unsigned void
    int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t bfloat16_t float16_t
    """
)
_NARROW = _words("half float16_t bfloat bfloat16_t")
_ELEMENTS = _words("char uchar short ushort int uint long ulong half bfloat float")
_VECTORS = frozenset(f"{packed}{name}{n}" for packed in ("", "packed_") for name in _ELEMENTS for n in (2, 3, 4))
_CLASSES = _words("vec atomic simdgroup_matrix atomic_int atomic_uint atomic_float")
_SPACES = _words("device constant threadgroup thread")
_SPECIFIERS = _words("const volatile static constexpr inline typename struct metal extern")

# The specification's restrictions on C++ (1.5.4), and what only clang's dialect has.
_NOT_IN_METAL = _words(
    """
    double goto new delete throw try catch virtual typeid dynamic_cast thread_local register asm noexcept
    co_await co_yield co_return
    """
)
_OPENCL = _words(
    """
    vec_step addrspace_cast event_t sampler_t queue_t clk_event_t reserve_id_t image1d_t image2d_t image3d_t
    atomic_long atomic_ulong atomic_double atomic_flag atomic_size_t atomic_ptrdiff_t atomic_intptr_t
    atomic_uintptr_t
    """
)
# Plain identifiers in Metal, keywords in OpenCL.
_RENAMED = _words("global local generic pipe read_only write_only read_write")
_PREDEFINED = _words("__METAL_VERSION__ __METAL__ __LINE__ __FILE__ __COUNTER__ __FAST_MATH__")
_OPENCL_SWIZZLE = re.compile(r"[sS][0-9a-fA-F]+|lo|hi|even|odd")


class DialectError(Exception):
    """The source is not Metal, although clang might take it. `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass
class Token:
    text: str
    kind: str
    line: int


def tokenize(source: str) -> list[Token]:
    tokens = []
    line = 1
    for match in _TOKEN.finditer(source):
        tokens.append(Token(match.group(), match.lastgroup or "mark", line))
        line += match.group().count("\n")
    return tokens


def check(source: str, template_types: Iterable[str] = ()) -> None:
    """DialectError if `source` holds something that is not Metal. `template_types`: names of `typename`
    arguments."""
    tokens = [token for token in tokenize(source) if token.kind not in ("space", "directive")]
    types = _SCALARS | _VECTORS | _CLASSES | frozenset(template_types) | _declared_types(tokens)
    named = {token.text for i, token in enumerate(tokens) if not i or tokens[i - 1].text != "."}
    for i, token in enumerate(tokens):
        before = tokens[i - 1].text if i else ""
        if token.kind == "word":
            _check_word(token)
            if before == "." and _OPENCL_SWIZZLE.fullmatch(token.text) and token.text not in named:
                raise DialectError(token.line, f"`.{token.text}` is an OpenCL swizzle, not Metal")
        elif token.text in ("*", "&") and i:
            _check_pointer(tokens, i, types)
        elif token.text == "[" and before in ("=", "(", ",", "return", "{"):
            raise DialectError(token.line, "Metal 3.1 has no lambda expressions")
        elif token.text == "(" and i + 2 < len(tokens) and tokens[i + 2].text == ")":
            follower = tokens[i + 3].text if i + 3 < len(tokens) else ""
            is_call = bool(re.fullmatch(r"\w+|>", before)) and before != "return"
            if tokens[i + 1].text in _VECTORS and not is_call and re.match(r"[\w(]", follower):
                raise DialectError(
                    token.line, "cast to a vector type: use a constructor, the two languages differ here"
                )


def _check_word(token: Token) -> None:
    word = token.text
    if word in _NOT_IN_METAL:
        raise DialectError(token.line, f"Metal has no `{word}`")
    if word in _OPENCL:
        raise DialectError(token.line, f"`{word}` is OpenCL, not Metal")
    reserved = word.startswith("__") and word not in _PREDEFINED
    if reserved or word.startswith(("mc_", "MC_", "mlx_builtin_")):
        raise DialectError(token.line, f"`{word}` is not a name of the Metal specification")


def _declared_types(tokens: Sequence[Token]) -> frozenset[str]:
    """Names that the source itself declares as types: structs, aliases, template parameters."""
    names = set()
    for i in range(len(tokens) - 1):
        if tokens[i].text in ("struct", "class", "union", "typename", "using", "enum") and tokens[i + 1].kind == "word":
            names.add(tokens[i + 1].text)
        if tokens[i].text == "typedef":
            end = next((k for k in range(i, len(tokens)) if tokens[k].text == ";"), i)
            names.add(tokens[end - 1].text)
    return frozenset(names - {"namespace", "metal"})


def _open_of(tokens: Sequence[Token], close: int, pair: tuple[str, str]) -> int:
    depth = 0
    for i in range(close, -1, -1):
        depth += (tokens[i].text == pair[1]) - (tokens[i].text == pair[0])
        if depth == 0:
            return i
    return -1


def _close_of(tokens: Sequence[Token], start: int, pair: tuple[str, str]) -> int:
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i].text == pair[0]) - (tokens[i].text == pair[1])
        if depth == 0:
            return i
        if tokens[i].text in (";", "{", "}") and pair == ("<", ">"):
            break
    return -1


def _check_pointer(tokens: Sequence[Token], at: int, types: frozenset[str]) -> None:
    """A pointer or reference must name an address space: `float*` is an error in Metal, and generic in
    OpenCL."""
    i = at - 1
    spaced = False
    while i > 0 and (tokens[i].text in ("const", "volatile") or tokens[i].text in _SPACES):
        spaced |= tokens[i].text in _SPACES
        i -= 1
    if tokens[i].text == ">":
        i = _open_of(tokens, i, ("<", ">")) - 1
    if i < 0 or tokens[i].text not in types:
        return
    # `N * size` where a value has the name of a type does not occur: types are not values.
    while i >= 0 and (tokens[i].text in types | _SPACES | _SPECIFIERS or tokens[i].text == "::"):
        spaced |= tokens[i].text in _SPACES
        i -= 1
    if not spaced:
        kind = "pointer" if tokens[at].text == "*" else "reference"
        raise DialectError(
            tokens[at].line, f"the {kind} names no address space (device, constant, threadgroup, thread)"
        )


def rewrite(source: str, *, is_body: bool, types: Iterable[str] = ()) -> str:
    """`source` as clang can compile it. In a kernel's body, threadgroup variables become the runtime's."""
    tokens = tokenize(source)
    significant = [token for token in tokens if token.kind not in ("space", "directive")]
    vectors = _VECTORS | _vector_aliases(significant)
    scalars = _NARROW | frozenset(types)
    scalars |= {after.text for token, after in pairwise(significant) if token.text == "typename"}
    _rename(significant)
    _rewrite_constructors(significant, vectors, scalars)
    _drop_method_spaces(significant)
    if is_body:
        _rewrite_threadgroup(significant)
    return "".join(token.text for token in tokens)


def _vector_aliases(tokens: Sequence[Token]) -> frozenset[str]:
    names = set()
    for i in range(len(tokens) - 3):
        if tokens[i].text == "using" and tokens[i + 2].text == "=":
            j = i + 3 + 2 * (tokens[i + 3].text == "metal")
            if tokens[j].text == "vec" or tokens[j].text in _VECTORS:
                names.add(tokens[i + 1].text)
        if tokens[i].text == "typedef" and (tokens[i + 1].text == "vec" or tokens[i + 1].text in _VECTORS):
            end = next((k for k in range(i, len(tokens)) if tokens[k].text == ";"), i)
            names.add(tokens[end - 1].text)
    return frozenset(names)


def _rename(tokens: Sequence[Token]) -> None:
    for token in tokens:
        if token.text in _RENAMED:
            token.text += "_"


def _rewrite_constructors(tokens: Sequence[Token], vectors: frozenset[str], scalars: frozenset[str]) -> None:
    """`float4(...)`, `vec<T, 4>(...)` and `static_cast<float4>(...)` -> `metal::__make<...>(...)`.

    And `static_cast<T>(...)` -> `metal::__cast<T>(...)`: clang has no cast between half and bfloat.
    """
    for i, token in enumerate(tokens):
        is_cast = i > 1 and tokens[i - 1].text == "<" and tokens[i - 2].text == "static_cast"
        if is_cast and token.text in scalars and i + 1 < len(tokens) and tokens[i + 1].text == ">":
            tokens[i - 2].text = "metal::__cast"
        if token.text == "vec" or token.text in vectors:
            end = i
            if token.text == "vec":
                if i + 1 >= len(tokens) or tokens[i + 1].text != "<":
                    continue
                end = _close_of(tokens, i + 1, ("<", ">"))
            if end < 0 or end + 1 >= len(tokens):
                continue
            start = i - 2 if i >= 2 and tokens[i - 1].text == "::" else i
            before = tokens[start - 1].text if start else ""
            before_that = tokens[start - 2].text if start > 1 else ""
            if tokens[end + 1].text == "(" and before != "operator":
                tokens[start].text = "metal::__make<" + tokens[start].text
                tokens[end].text += ">"
            elif before == "<" and before_that == "static_cast" and tokens[end + 1].text == ">":
                tokens[start - 2].text = "metal::__make"


def _drop_method_spaces(tokens: Sequence[Token]) -> None:
    """`void next(int n) thread {`: clang wants no qualifier there for plain objects."""
    for i in range(1, len(tokens)):
        after = 1 if tokens[i - 1].text == ")" else 2 if tokens[i - 1].text == "const" and i > 1 else 0
        if tokens[i].text == "thread" and after and tokens[i - after].text == ")":
            tokens[i].text = ""


def _rewrite_threadgroup(tokens: Sequence[Token]) -> None:
    site = 0
    for i, token in enumerate(tokens):
        if token.text != "threadgroup" or (i and tokens[i - 1].text not in (";", "{", "}", ")", "volatile")):
            continue
        end = next((k for k in range(i, len(tokens)) if tokens[k].text == ";"), -1)
        if end < 0:
            continue
        statement = tokens[i + 1 : end]
        declarators = _split_declarators(statement)
        if declarators is None:
            continue
        base, variables = declarators
        if any(part.text == "=" for variable in variables for part in variable):
            raise DialectError(token.line, "a threadgroup variable cannot have an initialiser")
        text = []
        for variable in variables:
            name = variable[0].text
            bounds = "".join(part.text for part in variable[1:]).replace("[", "[(").replace("]", ")]")
            target = f"(&{name}){bounds}" if bounds else f"&{name}"
            memory = f'metal::__threadgroup_variable<{base}{bounds}>({site}, "{name}")'
            text.append(f"threadgroup {base} {target} = {memory}")
            site += 1
        token.text = "; ".join(text)
        for part in statement:
            part.text = ""


def _split_declarators(statement: Sequence[Token]) -> tuple[str, list[list[Token]]] | None:
    """`T a[N], b` -> ("T", [[a, [, N, ]], [b]]); None if it declares pointers or references."""
    depth = angle = 0
    pieces: list[list[Token]] = [[]]
    for i, token in enumerate(statement):
        if token.text == "<" and depth == 0 and i and statement[i - 1].kind == "word":
            angle += 1
        elif token.text == ">" and angle and depth == 0:
            angle -= 1
        elif token.text in ("[", "(", "{"):
            depth += 1
        elif token.text in ("]", ")", "}"):
            depth -= 1
        elif token.text in ("*", "&") and depth == 0 and angle == 0:
            return None
        if token.text == "," and depth == 0 and angle == 0:
            pieces.append([])
        else:
            pieces[-1].append(token)
    first = pieces[0]
    cut = next((k for k, token in enumerate(first) if token.text in ("[", "=")), len(first))
    if cut < 2:
        return None
    base = " ".join(token.text for token in first[: cut - 1]).replace(" :: ", "::")
    return base, [first[cut - 1 :], *pieces[1:]]
