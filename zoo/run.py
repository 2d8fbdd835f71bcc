"""Trains every task of the zoo with the methods asked for and keeps what came out.

    python zoo/run.py --data DIR adaptive adam

A method is one of methods.py; a tuned one is run with each of its rates. What results.csv has is not run
again, so that an interrupted run goes on. Seed 0 of everything comes first.
"""

import argparse
import concurrent.futures
import csv
import pathlib
import sys

import data
import torch
from methods import RATES
from tasks import TASKS

RESULTS = pathlib.Path(__file__).parent / "results.csv"
KEY = ["task", "method", "rate", "seed"]
NUMBERS = ["training_loss", "smallest", "last", "diverged", "seconds"]


def run(folder: pathlib.Path, task: str, method: str, rate: str, seed: int) -> dict[str, float]:
    from train import train

    torch.set_num_threads(1)
    data.folder = folder
    return train(task, method, rate, seed)


def read(path: pathlib.Path) -> dict[tuple[str, str, str, int], dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(r["task"], r["method"], r["rate"], int(r["seed"])): r for r in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="+", metavar="METHOD", choices=RATES, help=", ".join(RATES))
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder with MNIST's IDX files")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated; default: all")
    parser.add_argument("--seeds", type=int, default=10, help="at most so many of each task's seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    names = options.tasks.split(",")
    for name in names:
        if name not in TASKS:
            parser.error(f"{name!r} is none of: {', '.join(TASKS)}")

    there = read(options.results)
    wanted = [
        (name, method, rate, seed)
        for seed in range(options.seeds)
        for method in options.methods
        for rate in RATES[method]
        for name in names
        if seed < TASKS[name].seeds
    ]
    with (
        options.results.open("a", newline="") as file,
        concurrent.futures.ProcessPoolExecutor(options.jobs) as pool,
    ):
        rows = csv.writer(file, lineterminator="\n")
        if not there:
            rows.writerow(KEY + NUMBERS)
        running = {pool.submit(run, options.data, *key): key for key in wanted if key not in there}
        for done in concurrent.futures.as_completed(running):
            found = done.result()
            rows.writerow([*running[done], *(f"{found[number]:.6g}" for number in NUMBERS)])
            file.flush()
            print(*running[done], *(f"{found[number]:.4g}" for number in NUMBERS), file=sys.stderr)


if __name__ == "__main__":
    main()
