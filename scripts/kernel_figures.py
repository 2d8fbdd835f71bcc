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


def under_way(lines, kind):
    """Bytes that a thread has asked for at once in wide loads, at most: loads follow one another until something
    uses what one of them brings. Sums read past the first-level cache, the update reads what it needs once more."""
    pattern = {"sums": r"LDG\.E\.(64|128)\.STRONG\.GPU", "update": r"LDG\.E\.EF\.(64|128)"}[kind]
    most, pending = 0, []
    for line in lines:
        match = re.search(r"\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if match is None:
            # A label: others may come here.
            pending = []
            continue
        predicate, operation, operands = match.groups()
        if operation.split(".")[0] in {"BRA", "EXIT", "BAR", "CALL", "RET"}:
            pending = []
            continue
        # Folds of sums load under a condition.
        load = re.fullmatch(pattern, operation) if predicate is None or kind == "update" else None
        used = registers_of(operands.split(",", 1)[1] if load else operands)
        for place in range(len(pending) - 1, -1, -1):
            if used & pending[place][0]:
                # What was asked for before it is there too.
                del pending[: place + 1]
                break
        if load:
            size, first = int(load.group(1)) // 8, int(re.match(r"R(\d+)", operands).group(1))
            pending.append((set(range(first, first + size // 4)), size))
            most = max(most, sum(size for _, size in pending))
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
