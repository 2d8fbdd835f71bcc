"""Prints the tables of the zoo's README from the results: `python zoo/table.py [METHOD]`, adaptive by default.

Numbers are means over the seeds that all runs of a task have. Of a tuned method the best rate counts for each
task and each column, known only after training with all of them.
"""

import math
import statistics
import sys

from methods import RATES
from run import RESULTS, read
from tasks import TASKS

BASELINES = ["adam", "adamw", "prodigy", "schedule-free", "sgd"]
SOLVED = 0.08  # iris: below what two classes that are not told apart leave
MEASURES = {
    "smallest": "Smallest validation loss at a checkpoint",
    "last": "Last validation loss",
    "training_loss": "Training loss, mean over the last tenth of the steps",
}

found = read(RESULTS)


def seeds_of(task: str, methods: list[str]) -> list[int]:
    """Seeds with which the task was run by all of the methods, with all of their rates."""
    return [
        seed
        for seed in range(TASKS[task].seeds)
        if all((task, m, rate, seed) in found for m in methods for rate in RATES[m])
    ]


def best(task: str, method: str, measure: str, seeds: list[int]) -> tuple[float, str]:
    """The mean less the task's floor, and the rate it was reached with."""
    return min(
        (statistics.fmean(float(found[task, method, rate, seed][measure]) for seed in seeds), rate)
        for rate in RATES[method]
    )


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def losses(ours: str, measure: str, methods: list[str]) -> list[str]:
    lines = [
        "| task | seeds | "
        + " | ".join(f"best {m}" if len(RATES[m]) > 1 else m for m in [ours, *methods])
        + " | ratio |",
        "|---|---|" + "---|" * (len(methods) + 2),
    ]
    for name, task in TASKS.items():
        seeds = seeds_of(name, [ours, *methods])
        if not seeds:
            continue
        cells = []
        for method in [ours, *methods]:
            value, rate = best(name, method, measure, seeds)
            cells.append(number(value) + (f" ({rate})" if rate and len(RATES[method]) > 1 else ""))
        mark = " (aside)" if task.aside else ""
        lines.append(
            f"| {name}{mark} | {len(seeds)} | {' | '.join(cells)} | {ratio(name, ours, 'adam', measure, seeds):.2f} |"
        )
    return lines


def ratio(task: str, ours: str, baseline: str, measure: str, seeds: list[int]) -> float:
    floor = TASKS[task].floor
    own, other = (best(task, m, measure, seeds)[0] - floor for m in (ours, baseline))
    return own / other


def means(ours: str, methods: list[str]) -> list[str]:
    lines = [
        "| of | tasks | "
        + " | ".join(f"{x}, {kind}" for x in ("smallest", "last", "training") for kind in ("mean", "worst"))
        + " |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for baseline in methods:
        for aside in (False, True):
            cells = []
            counted = 0
            for measure in MEASURES:
                ratios = []
                for name, task in TASKS.items():
                    seeds = seeds_of(name, [ours, baseline])
                    if seeds and task.aside == aside and not task.luck:
                        ratios.append((ratio(name, ours, baseline, measure, seeds), name))
                counted = len(ratios)
                if ratios:
                    mean = math.exp(statistics.fmean(math.log(max(r, 1e-9)) for r, _ in ratios))
                    cells += [f"{mean:.3f}", f"{max(ratios)[0]:.2f} {max(ratios)[1]}"]
            if counted:
                title = ("best " if len(RATES[baseline]) > 1 else "") + baseline
                lines.append(f"| {title}{', aside' if aside else ''} | {counted} | {' | '.join(cells)} |")
    return lines


def solved(methods: list[str]) -> list[str]:
    lines = []
    for method in methods:
        for rate in RATES[method]:
            runs = [row for key, row in found.items() if key[:3] == ("iris", method, rate)]
            if runs:
                count = sum(float(row["last"]) < SOLVED for row in runs)
                lines.append(f"- {method} {rate}".rstrip() + f": {count} of {len(runs)}")
    return lines


def main() -> None:
    ours = sys.argv[1] if len(sys.argv) > 1 else "adaptive"
    methods = [m for m in BASELINES if seeds_of("iris", [m])]
    print(f"Ratios of {ours} to each baseline, geometric means over the tasks\n")
    print("\n".join(means(ours, methods)))
    for measure, title in MEASURES.items():
        print(f"\n{title}\n")
        print("\n".join(losses(ours, measure, methods)))
    print("\nIris, seeds that were solved\n")
    print("\n".join(solved([ours, *methods])))
    diverged = [key for key, row in found.items() if row["diverged"] == "1"]
    for method in [ours, *methods]:
        print(
            f"\nDiverged, {method}: "
            + (
                ", ".join(" ".join(map(str, (k[0], k[2], k[3]))) for k in diverged if k[1] == method)
                or "none"
            )
        )


if __name__ == "__main__":
    main()
