"""Makes a CUDA 12.4 compiler in a folder, for libdeepep_cuda12.so: PyPI has all of CUDA 12 but nvcc itself.

    .venv/bin/python tools/cuda12.py FOLDER

nvcc and what it calls come from Debian's package nvidia-cuda-toolkit, headers and libraries from PyPI's wheels in .venv
(tools/requirements-cuda12.txt). x86-64 alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import pathlib
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request

URL = "http://deb.debian.org/debian/pool/non-free/n/nvidia-cuda-toolkit/nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb"
SHA256 = "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"
# Of the package: folder of the toolkit, files.
FILES = {
    "bin": ["usr/lib/nvidia-cuda-toolkit/bin/nvcc"]
    + [f"usr/bin/{name}" for name in ("cudafe++", "ptxas", "fatbinary", "nvlink", "bin2c")],
    "bin/crt": [f"usr/lib/nvidia-cuda-toolkit/bin/crt/{name}.stub" for name in ("link", "prelink")],
    "nvvm/bin": ["usr/lib/nvidia-cuda-toolkit/bin/cicc"],
}
# Of the wheels: distribution, folder there, folder of the toolkit.
FOLDERS = (
    ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/include", "include"),
    ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/nvvm/libdevice", "nvvm/libdevice"),
    ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include", "include"),
    ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/lib", "lib"),
    ("nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include", "include"),
)
PROFILE = """TOP = $(_HERE_)/..
PATH += $(TOP)/bin:$(TOP)/nvvm/bin:
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
"""


def data_of(package: bytes) -> bytes:
    """The archive data.tar of a Debian package, an ar file whose last member it is.

    Raises:
        ValueError: the bytes are not such a file.
    """
    at = len(b"!<arch>\n")
    while at + 60 <= len(package):
        name, size = package[at : at + 16].decode().strip(), int(package[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError("no data.tar in the package")


def make(folder: pathlib.Path, package: bytes) -> None:
    """Unpacks the compiler below the folder, with the wheels' headers and libraries."""
    if (digest := hashlib.sha256(package).hexdigest()) != SHA256:
        raise ValueError(f"{URL} has the SHA-256 {digest}, not {SHA256}")
    with tarfile.open(fileobj=io.BytesIO(data_of(package))) as archive:
        for where, names in FILES.items():
            (folder / where).mkdir(parents=True, exist_ok=True)
            for name in names:
                content = archive.extractfile(f"./{name}")
                assert content is not None, name
                target = folder / where / pathlib.PurePath(name).name
                target.write_bytes(content.read())
                target.chmod(0o755)
    for distribution, source, target in FOLDERS:
        found = str(importlib.metadata.distribution(distribution).locate_file(source))
        shutil.copytree(found, folder / target, dirs_exist_ok=True)
    (folder / "bin" / "nvcc.profile").write_text(PROFILE)


def main(folder: pathlib.Path) -> int:
    print("cuda12: getting nvcc 12.4 from Debian (once, 90 MB)")
    try:
        with urllib.request.urlopen(URL, timeout=300) as answer:
            package = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"cuda12: {URL}: {error}. CUDA12=0 makes the wheel without libdeepep_cuda12.so", file=sys.stderr)
        return 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        make(pathlib.Path(made) / "toolkit", package)
        shutil.rmtree(folder, ignore_errors=True)
        (pathlib.Path(made) / "toolkit").rename(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
