"""tools/nvshmem_versions.py over a wheel that is made here."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import nvshmem_versions  # noqa: E402


@pytest.mark.skipif(not shutil.which("gcc") or not shutil.which("nm"), reason="needs gcc and nm (binutils)")
def test_a_release_that_lacks_a_function(tmp_path: pathlib.Path) -> None:
    names = nvshmem_versions.called()
    assert len(names) >= 12 and "nvshmem_ptr" in names
    (tmp_path / "host.c").write_text("".join(f"void {name}(void) {{}}\n" for name in names if name != "nvshmem_ptr"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "host.so", "host.c"], check=True, cwd=tmp_path)
    with zipfile.ZipFile(tmp_path / "nvidia_nvshmem_cu13-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "host.so", "nvidia/nvshmem/lib/libnvshmem_host.so.3")
        wheel.writestr("nvidia/nvshmem/include/nvshmem.h", "")
        wheel.writestr("nvidia/nvshmem/bin/perftest", "")
    home = nvshmem_versions.fetch("nvidia-nvshmem-cu13", "9.9.9", tmp_path / "out", tmp_path)
    assert nvshmem_versions.missing_functions(home) == "lacks nvshmem_ptr"
    assert (home / "include" / "nvshmem.h").exists() and not (home / "bin").exists()
