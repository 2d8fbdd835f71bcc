"""The part of scripts/bindings that writes src/backend/kernels.rs. Reads the lists of the headers as the C
preprocessor expands them: entries that end with a semicolon and begin with the name of their list."""

import sys

import machine_code


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


lists = {"instance": [], "phase": [], "single": [], "family": [], "dtype": []}
for entry in sys.stdin.read().split(";"):
    columns = [column.strip() for column in entry.split(",")]
    if columns[0] in lists:
        lists[columns[0]].append(columns[1:])
instances = lists["instance"]
phases, singles = ([row[0] for row in lists[name]] for name in ("phase", "single"))
kinds = list(dict.fromkeys(row[1] for row in instances))

names = [f"rfd_{phase}_{row[0]}" for row in instances for phase in phases]
names += [f"rfd_{single}" for single in singles]
print("// Made from kernels/instances.h by scripts/bindings; do not edit.")
print("//! The kernels and their instances.")
print("use std::ffi::CStr;")
print("use super::abi;")
print("/// What lists of tensors an instance is for.")
print("#[derive(Clone, Copy, Debug, PartialEq, Eq)]")
print(f"pub(crate) enum InstanceKind {{ {', '.join(camel(kind) for kind in kinds)} }}")
print("/// The instances of the kernels.")
print("#[derive(Clone, Copy, Debug, PartialEq, Eq)]")
print(f"pub(crate) enum Instance {{ {', '.join(camel(row[0]) for row in instances)} }}")
print("/// A kernel, by its place in [`Kernel::NAMES`].")
print("#[derive(Clone, Copy, PartialEq, Eq)]")
print("pub(crate) struct Kernel(usize);")
print("impl Kernel {")
print("/// Names of all kernels.")
print(f"pub const NAMES: [&CStr; {len(names)}] = [")
print("\n".join(f'c"{name}",' for name in names))
print("];")
parts = [row[0] + suffix for row in instances for suffix in ("", "_apart")] + ["apart", "halves", "common"]
part_of = [parts.index(row[0] if phase == "step" else f"{row[0]}_apart") for row in instances for phase in phases]
part_of += [parts.index(row[1]) for row in lists["single"]]
print("/// The part of the device code that has it, by its place in [`PARTS`].")
print("pub const fn part(self) -> usize {")
print(f"const PART: [usize; {len(names)}] = [{', '.join(map(str, part_of))}];")
print("PART[self.0] }")
for single in singles:
    print(f"pub const {single.upper()}: Kernel = Kernel({names.index(f'rfd_{single}')});")
for phase in phases:
    print(f"pub const fn {phase}(instance: Instance) -> Self {{ ENTRIES[instance as usize].{phase} }}")
print("/// The one at a place in [`Self::NAMES`].")
print("pub const fn at(index: usize) -> Self { Self(index) }")
print("/// Its place in [`Self::NAMES`].")
print("pub const fn index(self) -> usize { self.0 }")
print("}")
print("/// The parts that device code is compiled and loaded in.")
print(f"pub(crate) const PARTS: [&str; {len(parts)}] = [{', '.join(chr(34) + part + chr(34) for part in parts)}];")
print("/// The place of the one that belongs to no instance.")
print(f"pub(crate) const COMMON: usize = {parts.index('common')};")
print("/// PTX for compute capability 7.0 and newer, part by part.")
print('#[cfg(feature = "cuda")]')
print("pub(crate) const PTX: [&str; PARTS.len()] = [")
print("\n".join(f'include_str!("../../kernels/prebuilt/{part}.ptx"),' for part in parts))
print("];")
print("/// Of each part a line of text and deflated machine code.")
print('#[cfg(feature = "cuda")]')
print("pub(crate) type Packed = [&'static [u8]; PARTS.len()];")
print("/// Machine code, after the compute capability that it is for.")
print('#[cfg(feature = "cuda")]')
print(f"pub(crate) const MACHINE_CODE: [((i32, i32), Packed); {len(machine_code.ARCHITECTURES)}] = [")
for major, minor in machine_code.ARCHITECTURES:
    print(f"(({major}, {minor}), [")
    print("\n".join(f'include_bytes!("../../kernels/prebuilt/{machine_code.name(part, (major, minor))}"),' for part in parts))
    print("]),")
print("];")
print("/// What an instance is compiled for, and as.")
print("#[derive(Debug)]")
print("pub(crate) struct Entry {")
print("pub instance: Instance, pub kind: InstanceKind,")
print("/// Formats of parameters and gradients.")
print("pub param: u32, pub grad: u32,")
print("/// Whether there are master weights, and velocities.")
print("pub master: bool, pub velocity: bool,")
print(", ".join(f"{phase}: Kernel" for phase in phases))
print("}")
print("/// In the order of [`Instance`].")
print(f"pub(crate) const ENTRIES: [Entry; {len(instances)}] = [")
for name, kind, param, grad, master, velocity, *_ in instances:
    kernels = ", ".join(f"{phase}: Kernel({names.index(f'rfd_{phase}_{name}')})" for phase in phases)
    flags = ", ".join(
        f"{what}: {'true' if value == '1' else 'false'}" for what, value in [("master", master), ("velocity", velocity)]
    )
    print(f"Entry {{ instance: Instance::{camel(name)}, kind: InstanceKind::{camel(kind)},")
    print(f"param: abi::RFD_DTYPE_{param}, grad: abi::RFD_DTYPE_{grad}, {flags}, {kernels} }},")
print("];")
for name, what in [("family", "FAMILIES"), ("dtype", "DTYPES")]:
    rows = lists[name]
    if [row[1] for row in rows] != [str(number) for number in range(len(rows))]:
        sys.exit(f"RFD_{what} must be numbered in its order, from 0 on")
    print(f"/// The names in RFD_{what}, each at the place that is its number.")
    print(f"pub(crate) const {what}: &[&str] = &[{', '.join(f'{chr(34)}{row[0]}{chr(34)}' for row in rows)}];")
print("/// Whether the host has the same list: its numbers are those of the kernels then.")
print("pub(crate) const fn are_same(own: &[&str], kernels: &[&str]) -> bool {")
print("let mut i = 0;")
print("while i < own.len() && i < kernels.len() {")
print("if !own[i].eq_ignore_ascii_case(kernels[i]) { return false; }")
print("i += 1; }")
print("own.len() == kernels.len() }")
