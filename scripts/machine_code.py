"""The machine code that comes with the crate; a part of scripts/build-ptx and scripts/bindings.

Of each part of the device code, for each of these compute capabilities, also later ones of the same major
number run it. A file has a line of text, which names the sources and the PTX, and the code, deflated: most of it is zeros.
"""

import subprocess
import tempfile
import zlib

ARCHITECTURES = [(8, 0), (9, 0)]


def name(part, architecture):
    """The name of the file."""
    major, minor = architecture
    return f"{part}.sm_{major}{minor}"


def compile(ptxas, ptx, architecture):
    """The code that ptxas makes of a file of PTX."""
    major, minor = architecture
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        subprocess.run([ptxas, f"-arch=sm_{major}{minor}", ptx, "-o", cubin.name], check=True)
        return cubin.read()


def pack(first, code):
    """What a file has."""
    return f"{first}\n".encode() + zlib.compress(code, 9)


def unpack(file):
    """First line and code of a file; releases of zlib pack the same code in other ways."""
    first, packed = file.read_bytes().split(b"\n", 1)
    return first.decode(), zlib.decompress(packed)
