"""Trains every network of the zoo with the methods asked for, keeps the losses, and prints the table.

    python zoo/run.py --data DIR adaptive rfd

A method is one of methods.py. What results.csv already has is not run again; --again does. Without a method
the table is printed.
One method over all networks takes 6 to 15 minutes on 2 cores for 3 seeds (one thread a run).
"""

import argparse
import concurrent.futures
import csv
import math
import pathlib
import statistics
import sys

import torch
from methods import GRIDS, METHODS
from networks import TASKS

RESULTS = pathlib.Path(__file__).parent / "results.csv"
COLUMNS = ["network", "method", "seed", "epoch", "validation_loss"]
Losses = dict[tuple[str, str, int], dict[int, float]]

_data = None


def run(folder: str, network: str, method: str, seed: int, epochs: int) -> list[float]:
    from data import Data
    from train import train

    global _data  # once per process
    torch.set_num_threads(1)
    _data = _data or Data(folder)
    return train(_data, network, method, seed, epochs)


def read(path: pathlib.Path) -> Losses:
    losses: Losses = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = row["network"], row["method"], int(row["seed"])
                losses.setdefault(key, {})[int(row["epoch"])] = float(row["validation_loss"])
    return losses


def write(path: pathlib.Path, losses: Losses) -> None:
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for (network, method, seed), epochs in sorted(losses.items()):
            rows.writerows(
                [network, method, seed, epoch, f"{loss:.6g}"] for epoch, loss in sorted(epochs.items())
            )
    unfinished.replace(path)


def table(losses: Losses, epochs: int, seeds: list[int]) -> str:
    """Mean loss over the seeds after the last epoch; `-` where a seed is missing."""

    def mean(network: str, method: str) -> float:
        found = [losses.get((network, method, seed), {}).get(epochs, math.nan) for seed in seeds]
        return statistics.fmean(found)

    graded = {member for members in GRIDS.values() for member in members}
    single = [method for method in METHODS if method not in graded]
    columns = {name: members for name, members in GRIDS.items()} | {method: [method] for method in single}
    width = max(map(len, TASKS))
    lines = [" ".join([f"{'network':{width}}", *[f"{name:>13}" for name in columns]])]
    for network in TASKS:
        best = [
            min((mean(network, member) for member in members), key=lambda x: (math.isnan(x), x))
            for members in columns.values()
        ]
        cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in best]
        lines.append(" ".join([f"{network:{width}}", *[f"{cell:>13}" for cell in cells]]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--data", help="folder with MNIST's IDX files")
    parser.add_argument("--networks", default=",".join(TASKS), help="comma-separated; default: all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what the results have already")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    networks = options.networks.split(",")
    for name, known in [*((m, METHODS) for m in options.methods), *((n, TASKS) for n in networks)]:
        if name not in known:
            parser.error(f"{name!r} is none of: {', '.join(known)}")
    if options.methods and not options.data:
        parser.error("--data DIR is needed to train: a folder with MNIST's IDX files")

    losses = read(options.results)
    wanted = [(n, m, s) for s in seeds for m in options.methods for n in networks]
    missing = [key for key in wanted if options.again or options.epochs not in losses.get(key, {})]
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run, options.data, *key, options.epochs): key for key in missing}
        for done in concurrent.futures.as_completed(running):
            losses[running[done]] = dict(enumerate(done.result()))
            write(options.results, losses)
            print(*running[done], *(f"{x:.3f}" for x in done.result()), file=sys.stderr)
    print(table(losses, options.epochs, seeds))


if __name__ == "__main__":
    main()
