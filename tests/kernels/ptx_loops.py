"""Loops of a kernel's PTX, and whether one waits for what another program writes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

BRANCH = re.compile(r"^(?:@!?(\S+) )?bra(?:\.uni)? (\S+)$")
STATEMENT = re.compile(r"^(?:@!?(\S+) )?(\S+) (\{[^}]*\}|[^,]+)(.*)$")
NAME = re.compile(r"%?[A-Za-z_]\w*")
# Reads of what others write, and of a program's own. A number that is taken by adding 1 comes once.
OF_OTHERS = re.compile(r"^(ld\.(volatile|acquire|relaxed|mmio|cv)|atom)\b")
OWN = re.compile(r"^ld\S*\.(shared|param|local|const)\b|^atom\S*\.shared\b|^atom\S*\.add\..*, 1$")
# A register that has another number each round, and errors: of ptxas both are BPT.TRAP.
COUNT = re.compile(r"^(?:add|sub)\S* (\S+), \1, -?\d+$")
TRAP = re.compile(r"\b(trap|brkpt)$")


class Loop(NamedTuple):
    """What a loop does, how it ends, and what comes after it before any other branch."""

    statements: list[str]
    guards: list[str]  # registers that branches out of it read
    after: list[str]

    def _ends_by(self) -> Iterator[tuple[str, bool]]:
        """Statements that branches out of it depend on, and of each whether the loop writes what it reads."""
        writes = defaultdict(list)
        for parts in filter(None, map(STATEMENT.match, self.statements)):
            for name in NAME.findall(parts.group(3)):
                writes[name].append(parts)
        left, seen = list(self.guards), set()
        while left:
            for parts in writes[left.pop()]:
                guard, operation, to, sources = parts.groups()
                names = NAME.findall(sources)
                yield f"{operation} {to}{sources}", any(name in writes for name in names)
                if parts.string not in seen:
                    seen.add(parts.string)
                    left += [*names, guard] if guard else names

    @property
    def polls(self) -> bool:
        """Whether it ends by what it reads, each round anew, of memory that others write."""
        return any(_may_change(statement, moves) for statement, moves in self._ends_by())

    @property
    def gives_up(self) -> bool:
        """Whether it also ends by a count of its rounds, with an error."""
        counts = any(COUNT.search(statement) for statement, _ in self._ends_by())
        return counts and any(map(TRAP.search, self.after))


def _may_change(read: str, moves: bool) -> bool:
    """Whether a statement reads what may be another number at the same address; moves: the address is another."""
    if OWN.search(read):
        return False
    return bool(OF_OTHERS.search(read)) or (read.startswith("ld.") and not moves)


def loops(ptx: str) -> Iterator[Loop]:
    """Natural loops: of each block and one that it dominates and that leads back to it."""
    blocks = _blocks(ptx)
    following = _following(blocks)
    before = defaultdict(list)
    for number, targets in enumerate(following):
        for target in targets:
            before[target].append(number)
    for tail, heads in enumerate(following):
        for head in heads:
            body = _leading_to(tail, head, before)
            if head == 0 or 0 not in body:
                yield _loop(blocks, following, sorted(body))


def _blocks(ptx: str) -> list[list[str]]:
    """Basic blocks: statements without comments and the braces of scopes; a label, with its colon, begins one."""
    text = re.sub(r"//.*", "", ptx)
    text = re.sub(r"(?<![:\w$])([$\w]+):(?=\s)", r"\1:;", text)
    blocks = [["begin"]]
    for statement in (re.sub(r"^[{}] ?", "", " ".join(x.split())) for x in re.split(r"[;\n]", text)):
        if statement.endswith(":"):
            blocks.append([])
        if statement:
            blocks[-1].append(statement)
        if BRANCH.match(statement):
            blocks.append([])
    return [block for block in [*blocks, ["end"]] if block]


def _following(blocks: list[list[str]]) -> list[list[int]]:
    """Which blocks may come after each."""
    labels = defaultdict(list)
    for number, block in enumerate(blocks):
        if block[0].endswith(":"):
            labels[block[0][:-1]].append(number)
    following = []
    for number, block in enumerate(blocks):
        branch, targets = BRANCH.match(block[-1]), []
        if branch:
            targets = [branch.group(2)]
        elif block[-1].startswith("brx.idx "):  # by a table, which stands before it
            targets = re.findall(r"\$\w+", " ".join(block[1:-1]))
        # scopes may have labels of the same name
        found = [min(labels[target], key=lambda place, number=number: abs(place - number)) for target in targets]
        goes_on = not targets or (branch and branch.group(1))
        following.append([*found, number + 1] if goes_on and number + 1 < len(blocks) else found)
    return following


def _leading_to(tail: int, head: int, before: dict[int, list[int]]) -> set[int]:
    """Blocks from which a way leads to one, with that and a head behind which nobody looks."""
    body, left = {head}, [tail]
    while left:
        number = left.pop()
        if number not in body:
            body.add(number)
            left += before[number]
    return body


def _loop(blocks: list[list[str]], following: list[list[int]], body: list[int]) -> Loop:
    """The loop of some blocks."""
    ends = [number for number in body if not set(following[number]) <= set(body)]
    branches = [BRANCH.match(blocks[number][-1]) for number in ends]
    after = {target for number in ends for target in following[number] if target not in body}
    for number in list(after):
        while len(following[number]) == 1 and following[number][0] not in {*after, *body}:
            (number,) = following[number]
            after.add(number)
    return Loop(
        [x for number in body for x in blocks[number]],
        [x.group(1) for x in branches if x and x.group(1)],
        [x for number in after for x in blocks[number]],
    )
