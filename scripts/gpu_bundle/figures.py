"""What a run found, as tables and as a summary."""

import csv

# Rows of the first table in docs/performance.md, by the benchmark's names.
DOCUMENTED = {
    "flat 1e4": "flat 1e4",
    "M7": "M7, 2.29M in 15 tensors",
    "flat 1e7": "flat 1e7",
    "ResNet-50": "ResNet-50, 25.6M in 161 tensors",
    "GPT-2 124M": "GPT-2, 124M in 148 tensors",
    "Llama 1.1B": "Llama, 1.1B in 201 tensors",
}


def counters(log):
    """The metrics in a file of `ncu --csv`, after what else it printed."""
    text = log.read_text(encoding="utf-8").splitlines()
    start = next((number for number, line in enumerate(text) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no metrics in what ncu wrote: {text[-1] if text else 'nothing'}")
    return {
        row["Metric Name"]: float(row["Metric Value"].replace(",", ""))
        for row in csv.DictReader(text[start:])
    }


def of(results, name):
    """The figures of a part; none where there are none."""
    return next((part.get("figures") for part in results["parts"] if part["name"] == name), None)


def microseconds(value):
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def tables(results):
    """The tables of docs/performance.md."""
    machine = f"{results['machine']['card']}, {results['machine']['driver']}, {results['date']}"
    text = []
    if rows := of(results, "benchmark"):
        text += steps(rows, machine)
    if start := of(results, "time to start"):
        kinds = [kind for kind, _ in next(iter(start.values()))["first_step_s"]]
        text += [f"Seconds to start on {machine}.", ""]
        text += ["| | device | " + " | ".join(kinds) + " |", "|---|---|" + "---|" * len(kinds)]
        for name, found in start.items():
            cells = [
                f"{seconds:.3f}"
                for seconds in [found["open_s"], *(value for _, value in found["first_step_s"])]
            ]
            text.append(f"| {name} | " + " | ".join(cells) + " |")
        text.append("")
    if counted := of(results, "counters"):
        text += [f"One step from a cold cache, counted by ncu on {machine}.", ""]
        text += ["| list | MB read | MB written | hit rate of the second-level cache |", "|---|---|---|---|"]
        for name, found in counted.items():
            read, written = (found[f"dram__bytes_{what}.sum"] / 1e6 for what in ("read", "write"))
            text.append(
                f"| {name} | {read:.1f} | {written:.1f} | {found['lts__t_sector_hit_rate.pct']:.1f} % |"
            )
        text.append("")
    return "\n".join(text)


def steps(rows, machine):
    ceilings, *rows = rows
    rate = ceilings["ceiling_bytes_per_s"]
    copy = ceilings["copy_bytes_per_s"]
    text = [f"GB/s: read, then read, read, write {rate / 1e9:.0f}; copy {copy / 1e9:.0f}. Times in µs.", ""]
    text += [
        "| tensors | floor 16 B | floor 12 B | step, cold | step, warm | card, driver, date |",
        "|---|---|---|---|---|---|",
    ]
    published = {row["list"]: row for row in rows if row["kind"] == "f32"}
    for name, title in DOCUMENTED.items():
        if row := published.get(name):
            floors = [row["parameters"] * size / rate * 1e6 for size in (16, 12)]
            cells = map(microseconds, [*floors, row["cold_us"], row["warm_us"]])
            text.append(f"| {title} | " + " | ".join(cells) + f" | {machine} |")
    text += ["", "Cold, as a multiple of the time that its own bytes take.", ""]
    lists = list(dict.fromkeys(row["list"] for row in rows))
    text += ["| | kernels | " + " | ".join(lists) + " |", "|---|---|" + "---|" * len(lists)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = {row["list"]: row for row in rows if row["kind"] == kind}
        cells = [
            f"{own[name]['cold_us'] / own[name]['floor_us']:.2f}" if name in own else "" for name in lists
        ]
        text.append(f"| {kind} | {next(iter(own.values()))['kernels']} | " + " | ".join(cells) + " |")
    return [*text, ""]


def summary(results):
    text = [f"{results['machine']['card']}, driver {results['machine']['driver']}, {results['date']}"]
    for part in results["parts"]:
        missing = f"; not here: {part['missing']}" if part.get("missing") else ""
        text.append(f"{part['name']:38} {part['seconds']:6.1f} s  {part['state']}{missing}")
    if "seconds" in results:
        text.append(f"{results['seconds']} s in all")
    return "\n".join(text) + "\n"
