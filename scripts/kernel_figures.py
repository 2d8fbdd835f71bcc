"""What machine code says of the kernels' speed before a GPU has run them; the part of scripts/build-ptx that makes
the table of docs/performance.md."""

import re

THREADS = 256
# Of a multiprocessor of compute capability 9.0.
REGISTERS, MOST_THREADS, SHARED = 65536, 2048, 227 * 1024

BEGIN, END = "<!-- figures of machine code: scripts/build-ptx --figures -->", "<!-- end of figures -->"
HEADER = (
    "| instance | registers | blocks | spilled | sums, KB under way | update, KB under way | fences | full fences |\n"
    "|---|---|---|---|---|---|---|---|"
)


def sections(disassembly):
    """The lines of each kernel, functions that it calls included."""
    name, kernels = None, {}
    for line in disassembly.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            name = match.group(1)
            kernels[name] = []
        elif re.match(r"\s*\.section", line):
            name = None
        elif name is not None:
            kernels[name].append(line)
    return kernels


def registers_of(text):
    return {int(number) for number in re.findall(r"\bR(\d+)\b", text)}


class Instruction:
    """One of a kernel, and which may follow it."""

    def __init__(self, place, predicate, operation, operands):
        self.place, self.predicate, self.operation, self.operands = place, predicate, operation, operands
        self.next = []


def instructions(lines):
    """Those of a kernel, joined as they may follow one another within it."""
    found, places = [], {}
    for line in lines:
        if match := re.search(r"\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;(.*)", line):
            predicate, operation, operands, targets = match.groups()
            found.append((Instruction(len(found), predicate, operation, operands), operands + targets))
        elif match := re.match(r"(\.L\w+):", line):
            places[match.group(1)] = len(found)
    for place, (instruction, text) in enumerate(found):
        kind = instruction.operation.split(".")[0]
        if kind in {"BRA", "BRX"}:
            instruction.next = [found[places[label]][0] for label in re.findall(r"\.L\w+", text)]
        always = instruction.predicate is None and "," not in instruction.operands
        ends = kind in {"EXIT", "RET", "BRX"} or (kind == "BRA" and always)
        if place + 1 < len(found) and not (ends and instruction.predicate is None):
            instruction.next.append(found[place + 1][0])
    return [instruction for instruction, _ in found]


def opposite(one, other):
    return one is not None and other is not None and one != other and one.strip("!") == other.strip("!")


class Load:
    """A wide load: the registers it fills, its bytes and its condition."""

    def __init__(self, instruction, size):
        first = int(re.match(r"R(\d+)", instruction.operands).group(1))
        self.registers = frozenset(range(first, first + size // 4))
        self.size, self.predicate = size, instruction.predicate

    def replaces(self, other):
        """Of two under opposite conditions, which fill the same registers, one is asked for."""
        return bool(self.registers & other.registers) and opposite(self.predicate, other.predicate)


def wide_loads(code, kind):
    """Those of a pass, by place. Sums read past the first-level cache, the update reads what it needs once more."""
    pattern = {"sums": r"LDG\.E\.(64|128)\.STRONG\.GPU", "update": r"LDG\.E\.EF\.(64|128)"}[kind]
    found = {}
    for instruction in code:
        if match := re.fullmatch(pattern, instruction.operation):
            found[instruction.place] = Load(instruction, int(match.group(1)) // 8)
    if kind == "sums":
        # Folds of sums load under a condition, elements under one only if another format has the opposite.
        alone = [
            place
            for place, load in found.items()
            if load.predicate is not None and not any(load.replaces(other) for other in found.values())
        ]
        for place in alone:
            del found[place]
    return found


def under_way(lines, kind):
    """Bytes that a thread has asked for at once in wide loads, at most, over all ways through the code: loads follow
    one another until something uses what one of them brings."""
    code = instructions(lines)
    loads = wide_loads(code, kind)
    most, seen, ways = 0, set(), [(code[0], ())]
    while ways:
        here, pending = ways.pop()
        if (here, pending) in seen:
            continue
        seen.add((here, pending))
        load = loads.get(here.place)
        if load:
            pending = tuple(one for one in pending if not load.replaces(one))
            used = registers_of(here.operands.split(",", 1)[1]) | load.registers
        else:
            used = registers_of(here.operands)
        for place in range(len(pending) - 1, -1, -1):
            if used & pending[place].registers:
                # What was asked for before it is there too.
                pending = pending[place + 1 :]
                break
        if here.operation.split(".")[0] in {"EXIT", "BAR", "CALL", "RET"}:
            pending = ()
        if load:
            pending += (load,)
            most = max(most, sum(one.size for one in pending))
        # Backwards begins another round of a loop.
        ways += [(there, pending if there.place > here.place else ()) for there in here.next]
    return most


def table(disassembly, resources):
    """The table; `resources` are registers, spilled bytes and bytes of shared memory by kernel."""
    rows = [HEADER]
    for name, lines in sorted(sections(disassembly).items()):
        if not name.startswith("rfd_step_"):
            continue
        registers, spilled, shared = resources[name]
        blocks = min(
            MOST_THREADS // THREADS, REGISTERS // (THREADS * -(-registers // 8) * 8), SHARED // (shared + 1024)
        )
        fences, full = (sum(1 for line in lines if re.search(pattern, line)) for pattern in (r" MEMBAR\b", r" MEMBAR\.SC\b"))
        sums, update = (under_way(lines, kind) * THREADS * blocks // 1024 for kind in ("sums", "update"))
        rows.append(
            f"| {name.removeprefix('rfd_step_')} | {registers} | {blocks} | {spilled} | {sums} | {update} | {fences} | {full} |"
        )
    return "\n".join(rows)


def replaced(document, new, begin=BEGIN, end=END):
    """The document with its table, between two marks, replaced, and the table that it had."""
    before, rest = document.split(begin)
    old, after = rest.split(end)
    return f"{before}{begin}\n{new}\n{end}{after}", old.strip()
