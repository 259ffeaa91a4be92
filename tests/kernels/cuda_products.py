"""Products of CUDA C++ sources by their text, and the names that a source declares with a type."""

from __future__ import annotations

import re
from collections.abc import Iterator

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|->|[-+*/%<>=!&|]=|&&|\|\||<<|>>|\S")
NAME = re.compile(r"[A-Za-z_]\w*")
OPERAND = re.compile(r"\w|\)|\]")
# Before a star that is no product, and in casts.
TYPES = {
    "auto", "char", "const", "float", "i64", "i8", "int", "return", "u16", "u32", "u8", "void",
    "Operand", "T", "float2", "float4", "uint2", "uint4",
}  # fmt: skip


def code_of(text: str) -> str:
    """Without comments, strings and directives."""
    text = re.sub(r'"(\\.|[^"])*"', '""', re.sub(r"//[^\n]*", "", text))
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)


def declared(text: str, kind: str) -> set[str]:
    """Names of variables, arguments and fields of a type, pointers too."""
    found = set()
    for one in re.finditer(rf"\b{kind}\b([^;(){{}}]*)", code_of(text)):
        for part in one.group(1).split(","):
            name = re.match(rf"\s*(?:const\s+)?(?:{kind}\b)?\s*\**\s*([A-Za-z_]\w*)\s*(?:=|\[|$)", part)
            if name:
                found.add(name.group(1))
    return found


def products(text: str) -> Iterator[str]:
    """The largest products of a source, quotients in them too, their tokens a space apart."""
    source = _Source(text)
    end = 0
    for i in range(1, len(source.tokens) - 1):
        if i >= end and source.is_product(i):
            begin, end = source.extent(i)
            yield " ".join(source.tokens[begin:end])


class _Source:
    def __init__(self, text: str) -> None:
        self.tokens, self.other, opened = TOKEN.findall(code_of(text)), {}, []
        for i, x in enumerate(self.tokens):
            if x in "([":
                opened.append(i)
            elif x in ")]":
                j = opened.pop()
                self.other[i], self.other[j] = j, i

    def is_product(self, i: int) -> bool:
        before, after = self.tokens[i - 1], self.tokens[i + 1]
        is_operand = OPERAND.match(before) and before not in TYPES and not self._ends_cast(i - 1)
        is_operand = is_operand and not (
            before == ")" and self.tokens[self.other[i - 1] - 1] in ("if", "for", "while")
        )
        return self.tokens[i] == "*" and bool(is_operand) and bool(NAME.match(after) or after[0] in "(-.0123456789")

    def extent(self, i: int) -> tuple[int, int]:
        """First token of a product's left side, and behind the last of its right side, with what follows."""
        begin, last = self._begin(i - 1), self._last(i + 1)
        while begin >= 2 and self.tokens[begin - 1] in "*/%" and OPERAND.match(self.tokens[begin - 2]):
            begin = self._begin(begin - 2)
        while last + 1 < len(self.tokens) and self.tokens[last + 1] in "*/%":
            last = self._last(last + 2)
        return begin, last + 1

    def _is_operand(self, i: int) -> bool:
        """Whether token i may end one."""
        x = self.tokens[i]
        return bool(OPERAND.match(x)) and x not in TYPES and not self._ends_cast(i)

    def _ends_cast(self, i: int) -> bool:
        if self.tokens[i] != ")":
            return False
        inside = self.tokens[self.other[i] + 1 : i]
        return bool(inside) and all(x in TYPES or x == "*" for x in inside)

    def _begin(self, i: int) -> int:
        """Of the operand that ends with token i."""
        while True:
            if self.tokens[i] in ")]":
                i = self.other[i]
                if (
                    OPERAND.match(self.tokens[i - 1])
                    and self.tokens[i - 1] not in TYPES
                    and not self._ends_cast(i - 1)
                ):
                    i -= 1
                    continue
            if self.tokens[i - 1] not in (".", "->"):
                break
            i -= 2
        while self._ends_cast(i - 1):
            i = self.other[i - 1]
        return i

    def _last(self, i: int) -> int:
        """Of the operand that begins with token i."""
        while self.tokens[i] == "(" and self._ends_cast(self.other[i]):
            i = self.other[i] + 1
        i += self.tokens[i] == "-"
        i = self.other.get(i, i)
        while i + 1 < len(self.tokens) and self.tokens[i + 1] in ("(", "[", ".", "->"):
            i = self.other.get(i + 1, i + 2)
        return i
