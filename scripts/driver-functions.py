#!/usr/bin/env python3
"""The list of the driver's functions, made from NVIDIA's headers or checked against them.

    driver-functions.py --check                 the newest headers from the package index
    driver-functions.py --check --include DIR   headers that are there already
    driver-functions.py --write                 writes the list anew

The list (crates/abi/driver-functions.txt) holds names only, each binary version and each per-thread form on a line of its own.
`cargo test -p ebb-layer classes` fails on a name in it that has no class.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

LIST = pathlib.Path(__file__).resolve().parent.parent / "crates/abi/driver-functions.txt"
PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-profiler-api")
# Each way in which a program may see the headers: plain, per-thread streams, and with every old version.
VIEWS = ((), ("-DCUDA_API_PER_THREAD_DEFAULT_STREAM",), ("-D__CUDA_API_VERSION_INTERNAL",))
INTEROP = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h", "cudaProfiler.h")


def download(folder):
    for package in PACKAGES:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        )
        if done.returncode and package != "nvidia-cuda-profiler-api":
            sys.exit(f"{package} cannot be had")
    for wheel in pathlib.Path(folder).glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    headers = sorted(pathlib.Path(folder).rglob("cuda.h"))
    if not headers:
        sys.exit("the packages hold no cuda.h")
    return headers[0].parent


def plain(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def functions(include):
    names = set()
    for view in VIEWS:
        text = subprocess.run(
            ["cc", "-E", "-P", *view, f"-I{include}", str(include / "cuda.h")],
            check=True, capture_output=True, text=True,
        ).stdout
        # What is defined in the header itself is no function of the library.
        text = re.sub(r"static (?:__)?inline(?:__)?\s+CUresult[^{;]*", "", text)
        names |= set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", text))
    # These need headers of other libraries, so they are read and not preprocessed. One function is for another system.
    for name in INTEROP:
        if (include / name).exists():
            text = plain((include / name).read_text())
            names |= set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
            names |= set(re.findall(r"#define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*_v\d+)\s*$", text, flags=re.M))
    names -= {"cuWGLGetDevice"}
    version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (include / "cuda.h").read_text()).group(1)
    return version, names


def read_list():
    lines = LIST.read_text().split("\n")
    version = next(line.split()[1] for line in lines if line.startswith("version "))
    return version, {line for line in lines if re.fullmatch(r"cu[A-Z]\w*", line)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    parser.add_argument("--include", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version, names = functions(arguments.include or download(folder))
    if arguments.write:
        # What an older header had and the newest has not is still exported.
        known = read_list()[1] if LIST.exists() else set()
        text = f"# Functions of the driver, by scripts/driver-functions.py.\nversion {version}\n"
        LIST.write_text(text + "\n".join(sorted(names | known)) + "\n")
        return
    listed_version, listed = read_list()
    missing = sorted(names - listed)
    if missing or int(version) > int(listed_version):
        sys.exit(f"headers are of {version}, the list of {listed_version}; not in the list: {missing}")
    print(f"{len(names)} functions of {version} are in the list")


if __name__ == "__main__":
    main()
