"""The parts of a run, in their order: commands, limits, and what is read from them."""

import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import figures

# Short runs of many kinds of lists, by test program: what sanitizers look at.
SANITIZED = {
    "test-device": ["random_lists", "small_tensors", "adaptive_steps_match", "steps_with_the_same"],
    "test-sharded": ["random_parts"],
}
SANITIZED_CASES = 3
# Rows of the benchmark that counters are read for.
COUNTED = ["M7 f32", "flat 1e7 f32", "ResNet-50 f32"]
METRICS = [
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "gpu__time_duration.sum",
]
# What the Python package's tests import, and the wheels that have it where the machine doesn't.
NEEDED = {
    "cffi": ["cffi-*-cp{version}-*", "pycparser-*"],
    "pytest": ["pytest-*", "pluggy-*", "iniconfig-*", "packaging-*", "pygments-*"],
    "pyrfd": ["pyrfd-*"],
}


@dataclass
class Command:
    words: list
    environment: dict


@dataclass
class Part:
    name: str
    limit: float
    commands: list
    read: Callable | None = None
    # What could not be done here.
    missing: str = ""
    # Whether it may take what parts before it have left, and be stopped without that being a failure.
    takes_rest: bool = False
    may_be_cut: bool = False


def tool(name):
    """A program of CUDA, from the search path or its usual place."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def machine(options):
    if options.fake:
        return {"card": "a fake one", "driver": "a fake one"}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"card": f"unknown: {error}", "driver": "unknown"}
    card, _, driver = said.partition("\n")[0].partition(", ")
    return {"card": card, "driver": driver}


def python_path(options, here, work):
    """Folders with what the Python package needs and this Python lacks."""
    found = [here / "site"]
    version = "".join(map(str, python_version(options.python)))
    for module, patterns in NEEDED.items():
        if not has_module(options.python, module):
            folder = work / f"needs-{module}"
            for pattern in patterns:
                for wheel in glob.glob(str(here / "wheels" / (pattern.format(version=version) + ".whl"))):
                    zipfile.ZipFile(wheel).extractall(folder)
            found.append(folder)
    return os.pathsep.join(map(str, found))


def python_version(python):
    code = "import sys; print(*sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def has_module(python, name):
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def shared_library(here, work):
    """A folder in which linkers and loaders find the Python package's library."""
    folder = work / "lib"
    folder.mkdir()
    header = (here / "include" / "rfdescent.h").read_text(encoding="utf-8")
    abi = re.search(r"#define RFD_ABI_VERSION (\d+)", header).group(1)
    for name in ("librfdescent.so", f"librfdescent.so.{abi}"):
        (folder / name).symlink_to(here / "site" / "rfdescent" / "librfdescent.so")
    return folder


def lines(file):
    """Objects of a file that has one a line; the last may be cut off."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def all_parts(options, here, work):
    fake = options.fake
    quick = ["--quick"] if fake else []
    environment = {
        **os.environ,
        "RFDESCENT_REQUIRE_GPU": "1",
        "RUST_BACKTRACE": "1",
        "OMP_NUM_THREADS": "1" if fake else "8",
    }
    environment |= {"CUDA_CACHE_PATH": str(work / "cache"), "PYTHONUNBUFFERED": "1"}
    # PyTorch takes the fake driver for one that is too old.
    driver = {"LD_LIBRARY_PATH": f"{fake}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"} if fake else {}

    def plain(*words, **more):
        more = {name: str(value) for name, value in more.items()}
        return Command([str(word) for word in words], {**environment, **more})

    def command(*words, **more):
        return plain(*words, **driver, **more)

    test_graph, bench = (here / name for name in ("test-graph", "bench-device"))

    def start():
        runs = [("first", "0"), ("second", "0"), ("first, PTX", "1"), ("second, PTX", "1")]
        commands = []
        for name, ptx in runs:
            cache = work / ("cache-ptx" if ptx == "1" else "cache")
            more = {"CUDA_CACHE_PATH": cache, "CUDA_FORCE_PTX_JIT": ptx}
            commands.append(command(bench, "--start", "--json", work / f"start {name}.json", **more))
        return Part(
            "time to start",
            20,
            commands,
            lambda: {name: lines(work / f"start {name}.json")[0] for name, _ in runs},
        )

    def tests():
        cases = 2 if fake else 100
        programs = (here / "test-device", here / "test-sharded")
        yield Part("device tests", 60, [command(each, RFDESCENT_DEVICE_CASES=cases) for each in programs])
        # The others take a CPU long, and scripts/test-fake-cuda runs them.
        graphs = ["replays_of_one_launch"] if fake else []
        yield Part("graphs", 15, [command(test_graph, *graphs)])

    def benchmark():
        rows = work / "bench.json"
        return Part("benchmark", 75, [command(bench, "--json", rows, *quick)], lambda: lines(rows))

    def sanitizers():
        sanitizer = tool("compute-sanitizer")
        for name in ("memcheck", "racecheck", "initcheck", "synccheck"):
            words = [sanitizer, "--tool", name, "--error-exitcode", "1"] if sanitizer and not fake else []
            cases = 1 if fake else SANITIZED_CASES
            commands = [
                command(*words, here / program, *tests, "--test-threads=1", RFDESCENT_DEVICE_CASES=cases)
                for program, tests in SANITIZED.items()
            ]
            if fake and name != "memcheck":
                commands = []
            missing = "" if words else "compute-sanitizer" if fake else "compute-sanitizer is not installed"
            yield Part(name, 40, commands, missing=missing)

    def counters():
        ncu = tool("ncu")
        words = (
            [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(METRICS)]
            if ncu
            else []
        )
        # One of the warm steps; ncu itself empties the caches before.
        words += (
            ["--kernel-name", "regex:rfd_step", "--launch-skip", "5", "--launch-count", "1"] if ncu else []
        )
        if fake or not ncu:
            commands = [command(bench, f"={COUNTED[0]}", "--quick")] if fake else []
            return Part("counters", 25, commands, missing="ncu" if fake else "ncu is not installed")
        logs = {row: work / f"ncu {row}.csv" for row in COUNTED}
        commands = [command(*words, "--log-file", logs[row], bench, f"={row}", "--quick") for row in COUNTED]
        return Part(
            "counters", 25, commands, lambda: {row: figures.counters(log) for row, log in logs.items()}
        )

    def python():
        adapter = here / "adapters" / "python"
        # The bundle's packages go first only where the machine has none.
        run = {"PYTHONPATH": python_path(options, here, work), "PYTHONDONTWRITEBYTECODE": "1"}

        def program(*words, **more):
            return plain(options.python, *words, **run, **more)

        tests = [program("-m", "rfdescent", "doctor")]
        tests.append(
            program("-m", "pytest", "-p", "no:cacheprovider", "-rs", adapter / "tests" / "test_cuda.py")
        )
        if fake:
            tests.append(program(adapter / "tests" / "cuda_program.py", **driver))
        missing = "CUDA tensors of PyTorch" if fake else ""
        yield Part("Python package", 30, tests, missing=missing)
        device, seconds = ("cpu", 0.02) if fake else ("cuda", 0.3)
        steps = program(adapter / "benchmarks" / "step.py", "--device", device, "--seconds", seconds)
        yield Part("Python, time of a step", 20, [steps], missing=missing)
        words = ["--seeds", 1, "--batch-sizes", 1024, "--output", work / "case-study"]
        words += ["--small", "--train-images", 2048, "--epochs", 1] if fake else ["--full", "--epochs", 2]
        words += ["--data", options.data] if options.data else []
        study = program(here / "examples" / "python" / "case_study.py", *words)
        yield Part(
            "Python, automatic fit and case study",
            50,
            [study],
            missing=missing,
            takes_rest=True,
            may_be_cut=True,
        )

    def examples():
        library = shared_library(here, work)
        link = ["-I", here / "include", "-L", library, f"-Wl,-rpath,{library}", "-lrfdescent", "-lm"]
        c, device = here / "examples" / "c", here / "capi" / "tests" / "c" / "device.c"
        network = [c / "network.c", c / "data.c"]
        commands = [
            command("cc", "-O2", device, "-o", work / "device", *link, "-ldl"),
            command(work / "device", work),
            command("cc", "-O2", c / "train.c", *network, "-o", work / "train", *link),
            command(work / "train", "--epochs", 1),
        ]
        nvcc, missing = tool("nvcc"), ""
        if nvcc:
            target = "sm_90" if fake else "native"
            words = [
                nvcc,
                "-O2",
                "-std=c++17",
                f"-arch={target}",
                here / "examples" / "cuda" / "train.cu",
                *network,
            ]
            link = [
                "-I",
                here / "include",
                "-L",
                library,
                "-Xlinker",
                f"-rpath={library}",
                "-lrfdescent",
                "-lm",
            ]
            # Where nvcc is one of pip's wheels.
            link += ["-L", pathlib.Path(nvcc).parent.parent / "lib"]
            commands.append(command(*words, "-o", work / "train_cuda", *link))
        if nvcc and not fake:
            commands.append(command(work / "train_cuda", "--epochs", 1))
        else:
            missing = "running the example in CUDA C++" if nvcc else "nvcc: the example in CUDA C++"
        return Part("examples in C and CUDA", 20, commands, missing=missing)

    return [start(), *tests(), benchmark(), *sanitizers(), counters(), *python(), examples()]
