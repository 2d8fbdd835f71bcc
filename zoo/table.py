"""Prints the tables of results.md: `python zoo/table.py [METHOD]`, adaptive unless another is named.

Numbers are means over seeds. A baseline counts with the seeds that it has with all of its rates and that the
method has too; of its rates the best counts for each task and each table, known only after training with all.
"""

import math
import statistics
import sys

from methods import RATES
from run import RESULTS, read
from tasks import TASKS

SOLVED = 0.08  # iris: below what two classes leave that are not told apart
MEASURES = {
    "smallest": "Smallest validation loss at a checkpoint",
    "last": "Last validation loss",
    "training_loss": "Training loss, mean over the last tenth of the steps",
}

found = read(RESULTS)
BASELINES = [
    method
    for method in ("adam", "adamw", "prodigy", "schedule-free", "sgd")
    if any(key[1] == method for key in found)
]


def seeds_of(task: str, *methods: str) -> list[int]:
    """Seeds with which the task was run by all of the methods, with all of their rates."""
    return [
        seed
        for seed in range(TASKS[task].seeds)
        if all((task, m, rate, seed) in found for m in methods for rate in RATES[m])
    ]


def best(task: str, method: str, measure: str, seeds: list[int]) -> tuple[float, str]:
    """The mean with the best rate, and the rate; infinite where there is no finite one."""
    means = [(math.inf, "")]
    for rate in RATES[method]:
        values = [float(found[task, method, rate, seed][measure]) for seed in seeds]
        if values and not any(map(math.isnan, values)):
            means.append((statistics.fmean(values), rate))
    return min(means)


def ratio(task: str, ours: str, baseline: str, measure: str) -> float:
    """Of what is above the task's floor; not a number where a side is missing."""
    seeds = seeds_of(task, ours, baseline)
    own, other = (best(task, m, measure, seeds)[0] - TASKS[task].floor for m in (ours, baseline))
    return own / other if math.isfinite(other) else math.nan


def cell(task: str, ours: str, method: str, measure: str) -> str:
    value, rate = best(task, method, measure, seeds_of(task, ours, method))
    if math.isinf(value):
        return "-"
    return (f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}") + (f" ({rate})" if rate else "")


def title(method: str) -> str:
    return f"best {method}" if len(RATES[method]) > 1 else method


def losses(ours: str, measure: str) -> list[str]:
    lines = [
        "| task | seeds | " + " | ".join(map(title, [ours, *BASELINES])) + " | of best adam |",
        "|---|---|" + "---|" * (len(BASELINES) + 2),
    ]
    for name, task in TASKS.items():
        cells = [cell(name, ours, method, measure) for method in [ours, *BASELINES]]
        against = ratio(name, ours, "adam", measure)
        cells.append("-" if math.isnan(against) else f"{against:.2f}")
        seeds = len(seeds_of(name, ours))
        lines.append(f"| {name}{' (aside)' if task.aside else ''} | {seeds} | {' | '.join(cells)} |")
    return lines


def means(ours: str) -> list[str]:
    lines = ["| against | tasks | smallest | last | training |", "|---|---|---|---|---|"]
    for baseline in BASELINES:
        for aside in (False, True):
            counted = [name for name, task in TASKS.items() if task.aside == aside and not task.luck]
            counted = [name for name in counted if seeds_of(name, ours, baseline)]
            cells, most = [], 0
            for measure in MEASURES:
                ratios = [(ratio(name, ours, baseline, measure), name) for name in counted]
                ratios = [pair for pair in ratios if not math.isnan(pair[0])]
                if ratios:
                    mean = math.exp(statistics.fmean(math.log(r) for r, _ in ratios))
                    worst = ", ".join(f"{r:.2f} {name}" for r, name in sorted(ratios)[:-4:-1])
                    cells.append(f"**{mean:.3f}** ({worst})")
                    most = max(most, len(ratios))
            if cells:
                kind = ", tasks set aside" if aside else ""
                lines.append(f"| {title(baseline)}{kind} | {most} | {' | '.join(cells)} |")
    return lines


def solved(method: str) -> str:
    counts = []
    for rate in RATES[method]:
        runs = [row for key, row in found.items() if key[:3] == ("iris", method, rate)]
        if runs:
            count = sum(float(row["last"]) < SOLVED for row in runs)
            counts.append(f"{count} of {len(runs)}" + (f" ({rate})" if rate else ""))
    return f"- {method}: {', '.join(counts) or 'not run'}"


def diverged(method: str) -> str:
    runs = [key for key, row in found.items() if key[1] == method and row["diverged"] == "1"]
    names = sorted({f"{task} ({rate})" if rate else task for task, _, rate, _ in runs})
    return f"- {method}: {', '.join(names) or 'none'}"


def main() -> None:
    ours = sys.argv[1] if len(sys.argv) > 1 else "adaptive"
    print("# Tables of the zoo\n\nPrinted by `python zoo/table.py` from `results.csv`; see its README.")
    print("In parentheses: the best rate. Ratios are of the seeds that both have; losses of all.\n")
    print(f"Ratios of {ours} to each baseline, geometric means over the tasks (the three worst)\n")
    print("\n".join(means(ours)))
    for measure, name in MEASURES.items():
        print(f"\n{name}\n")
        print("\n".join(losses(ours, measure)))
    print("\nIris, runs that were solved\n")
    print("\n".join(map(solved, [ours, *BASELINES])))
    print("\nTasks with a run that diverged\n")
    print("\n".join(map(diverged, [ours, *BASELINES])))


if __name__ == "__main__":
    main()
