"""Makes fingerprint.ptx of fingerprint.cu, as text that every driver since CUDA 11.0 compiles for every GPU since sm_70.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvcc-cu12==12.9.86
    python generate.py [--check]

The compiler writes the version of its own text into the file; nothing in it is newer than 7.0, which is what is put there
instead, and `ptxas` (of the second package, or of $PATH) is asked whether it agrees.
"""

import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
HEAD = "// Made of fingerprint.cu by generate.py. Do not edit.\n"


def find(package, *path):
    spec = importlib.util.find_spec(package)
    for root in spec.submodule_search_locations if spec else []:
        found = pathlib.Path(root, *path)
        if found.exists():
            return str(found)
    return None


def compile_text(source):
    nvrtc = ctypes.CDLL(find("nvidia.cuda_nvrtc", "lib", "libnvrtc.so.12") or "libnvrtc.so.12")
    program = ctypes.c_void_p()
    check = lambda code: code == 0 or sys.exit(f"nvrtc: error {code}")
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fingerprint.cu", 0, None, None))
    options = [b"--gpu-architecture=compute_70"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetProgramLog(program, log))
    if code != 0:
        sys.exit(log.value.decode())
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, text))
    return text.value.decode()


def main():
    text = compile_text((HERE / "fingerprint.cu").read_text())
    text = re.sub(r"//.*\n", "\n", text)
    text = re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"
    text = HEAD + re.sub(r"\.version \S+", ".version 7.0", text)
    ptxas = find("nvidia.cuda_nvcc", "bin", "ptxas") or shutil.which("ptxas")
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "fingerprint.ptx")
        ptx.write_text(text)
        for arch in ["sm_70", "sm_80", "sm_90"]:
            subprocess.run([ptxas, f"-arch={arch}", "-v", "-o", f"{folder}/{arch}", str(ptx)], check=True)
    if "--check" in sys.argv:
        if (HERE / "fingerprint.ptx").read_text() != text:
            sys.exit("fingerprint.ptx is not what fingerprint.cu makes")
    else:
        (HERE / "fingerprint.ptx").write_text(text)


main()
