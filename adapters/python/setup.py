"""Builds the wheel: compiles the library with cargo, and turns its header into declarations for cffi.

The declarations are made from the header itself, so that no struct is written down twice, and when the wheel
is built, so that importing parses nothing and users need no compiler.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
# The sources of the library: a source distribution has them beside this file.
ROOT = HERE / "library" if (HERE / "library").is_dir() else HERE.parent.parent
if not (ROOT / "include/rfdescent.h").is_file():
    sys.exit(
        "the library that the package carries is missing: build it inside the rfdescent repository, or from "
        "a source distribution"
    )
# All that cargo reads, members of the workspace that are not built among it.
SOURCES = (
    *("Cargo.toml", "Cargo.lock", "README.md", "build.rs", "src", "kernels", "include", "benches", "capi"),
    *("cli/Cargo.toml", "cli/src", "adapters/candle/Cargo.toml", "adapters/candle/README.md"),
    *("adapters/candle/src", "adapters/candle/benches"),
)
# The version of glibc that a wheel is to run with, such as 2.28; this machine's if empty.
GLIBC = os.environ.get("RFDESCENT_GLIBC", "")


def version() -> str:
    section = (ROOT / "Cargo.toml").read_text().split("[workspace.package]")[1]
    return re.search(r'^version = "(.*)"', section, re.MULTILINE)[1]


def build_library() -> Path:
    """The shared library, compiled with the default features, CUDA's among them."""
    if shutil.which("cargo") is None:
        sys.exit("cargo is missing: install Rust 1.91 or newer (https://rustup.rs), then run this again")
    command = ["cargo", "build"]
    if GLIBC:
        # cargo-zigbuild links with the glibc that it is told.
        command = ["cargo", "zigbuild", "--target", f"{platform.machine()}-unknown-linux-gnu.{GLIBC}"]
    command += ["-p", "rfdescent-capi", "--lib", "--release", "--locked"]
    command.append("--message-format=json-render-diagnostics")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("cargo could not build the library; what it said stands above")
    files = [
        Path(file)
        for message in map(json.loads, done.stdout.splitlines())
        if message["reason"] == "compiler-artifact" and message["target"]["name"] == "rfdescent"
        for file in message["filenames"]
    ]
    return next(file for file in files if file.suffix in (".so", ".dylib", ".dll"))


def declarations(header: str) -> str:
    """What cffi understands of the header: without preprocessor, but with the constants."""
    header = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", header, flags=re.DOTALL)
    kept = [
        line
        for line in header.splitlines()
        if not line.startswith("#") or re.match(r"#define \w+ \d+$", line)
    ]
    return "\n".join(kept)


class BuildPy(build_py):
    """Adds the shared library and the declarations to the package."""

    def run(self) -> None:
        super().run()
        from cffi import FFI

        package = HERE / "rfdescent" if self.editable_mode else Path(self.build_lib) / "rfdescent"
        package.mkdir(parents=True, exist_ok=True)
        built = build_library()
        library = package / built.name
        library.unlink(missing_ok=True)
        shutil.copyfile(built, library)
        if sys.platform == "linux" and shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
        ffi = FFI()
        # The header may declare a function twice.
        ffi.cdef(declarations((ROOT / "include/rfdescent.h").read_text()), override=True)
        ffi.set_source("rfdescent._declarations", None)
        ffi.emit_python_code(str(package / "_declarations.py"))


class BdistWheel(bdist_wheel):
    """Any Python 3, this platform: the library does not know of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        system = super().get_tag()[2]
        if GLIBC:
            system = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        return ("py3", "none", system)


class Sdist(sdist):
    """Adds the sources of the library."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in SOURCES:
            source, copy = ROOT / name, Path(base_dir) / "library" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy)
            elif source.is_file():
                shutil.copy2(source, copy)


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    version=version(),
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel, "sdist": Sdist},
)
