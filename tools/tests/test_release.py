"""What a release carries: pieces made twice have the same bytes, and hold what they say.

`make test-full` makes whole releases in two folders and compares them (suite `release`).
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from release import archives, debian, facts, notes, parts, sbom, source

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMIT = facts.Commit("0" * 40, 1_700_000_000)
BUILD = facts.Paths(ROOT / "build", ROOT / "dist")


@pytest.fixture(scope="module")
def found() -> list[parts.Part]:
    return parts.parts(BUILD)


@pytest.fixture(scope="module")
def bill(found: list[parts.Part]) -> str:
    return sbom.make_sbom(BUILD, COMMIT, found)


@pytest.fixture(scope="module")
def usr(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The files that `make install PREFIX=/usr` makes; program and library are small ones, quick to pack."""
    stage = tmp_path_factory.mktemp("stage")
    paths = {name: stage / "usr" / name for name in ("bin", "lib/pkgconfig", "lib/cmake/deepep", "include")}
    for path in paths.values():
        path.mkdir(parents=True)
    (stage / "small.c").write_text('int puts(const char*); int deepep_version(void) { return puts("1"); }')
    (stage / "main.c").write_text('int puts(const char*); int main(void) { return puts("1"); }')
    compiler, library = os.environ.get("CC", "gcc"), str(stage / "usr" / "lib" / BUILD.library.name)
    named = [f"-Wl,-soname,{BUILD.library.name}", f"-Wl,--version-script={ROOT / 'capi' / 'deepep.map'}"]
    facts.run(compiler, "-shared", "-fPIC", *named, "-o", library, stage / "small.c")
    facts.run(compiler, "-o", paths["bin"] / "deepep", stage / "main.c")
    shutil.copy(BUILD.build / "lib" / "libdeepep_cpu.so", stage / "usr" / "lib")
    (stage / "usr" / "lib" / "libdeepep.so").symlink_to(BUILD.library.name)
    for header in ("deepep.h", "deepep.hpp"):
        shutil.copy(ROOT / "include" / header, paths["include"])
    shutil.copy(ROOT / "cmake" / "deepep.pc.in", paths["lib/pkgconfig"] / "deepep.pc")
    shutil.copy(ROOT / "cmake" / "deepep-config.cmake.in", paths["lib/cmake/deepep"] / "deepep-config.cmake")
    return stage / "usr"


def test_archive_depends_on_contents_alone(tmp_path: pathlib.Path) -> None:
    made = []
    for number, (first, second) in enumerate((("b", "a"), ("a", "b"))):
        folder = tmp_path / f"tree{number}"
        (folder / "inner").mkdir(parents=True)
        for name in (first, second):
            (folder / "inner" / name).write_text(name)
        (folder / "inner" / "a").chmod(0o700 if number else 0o755)
        (folder / "link").symlink_to("inner/a")
        os.utime(folder / "inner" / "b", (number, number))
        archives.pack_tree(folder, "top", COMMIT.epoch, tmp_path / f"{number}.tar.gz")
        made.append((tmp_path / f"{number}.tar.gz").read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0.tar.gz") as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
    assert sorted(entries) == ["top", "top/inner", "top/inner/a", "top/inner/b", "top/link"]
    assert (entries["top/inner/a"].mode, entries["top/inner/b"].mode) == (0o755, 0o644)
    assert {entry.mtime for entry in entries.values()} == {COMMIT.epoch}
    assert {(entry.uname, entry.uid) for entry in entries.values()} == {("root", 0)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git repository")
def test_source_archive_holds_the_commit(tmp_path: pathlib.Path) -> None:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(source.write_source("Name: deepep-go\n", tmp_path / name))
    assert made[0].read_bytes() == made[1].read_bytes()
    top = f"deepep_go-{facts.version()}"
    assert made[0].name == f"{top}.tar.gz"
    with tarfile.open(made[0]) as archive:
        names = {entry.name for entry in archive.getmembers() if entry.isfile()}
    tracked = facts.run("git", "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert names == {f"{top}/{name}" for name in [*tracked, "PKG-INFO"]}


def test_sbom_names_what_is_linked_in(bill: str) -> None:
    """It agrees with the schema (make_sbom checks), and names modules, files with their hashes, and GPU code."""
    document = json.loads(bill)
    components = {component["name"]: component for component in document["components"]}
    assert components["github.com/ebitengine/purego"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    modules = {name for name in re.findall(r"^\t([\w./~-]+) v", (ROOT / "go.mod").read_text(), re.M)}
    assert {"go.uber.org/zap", "github.com/spf13/cobra"} <= modules & components.keys()
    assert {"stdlib", "libstdc++", "libdeepep_cpu.so", "deepep", BUILD.library.name} <= components.keys()
    uses = {entry["ref"]: set(entry.get("dependsOn", [])) for entry in document["dependencies"]}
    assert not {ref for ref in uses[f"file:{BUILD.library.name}"] if "cobra" in ref}  # the program alone has it
    assert {ref for ref in uses["file:deepep"] if "cobra" in ref}
    for library in (path.name for path in BUILD.kernel_libraries() if path.name in sbom.FLAGS):
        codes = {p["value"] for p in components[library]["properties"] if p["name"] == "deepep:gpu_code"}
        assert "sm_80" in codes
        assert any("nvidia-cuda-runtime" in ref for ref in uses[f"file:{library}"])


def test_sbom_is_a_function_of_build_and_commit(bill: str, found: list[parts.Part]) -> None:
    assert sbom.make_sbom(BUILD, COMMIT, list(reversed(found))) == bill
    assert sbom.make_sbom(BUILD, facts.Commit("1" * 40, COMMIT.epoch), found) != bill


def test_a_wrong_sbom_is_noticed(bill: str) -> None:
    document = json.loads(bill)
    document["components"][0]["type"] = "thing"
    with pytest.raises(facts.ReleaseError, match="schema"):
        sbom.check(json.dumps(document))


def test_an_unknown_licence_is_noticed() -> None:
    with pytest.raises(facts.ReleaseError, match="licence of some/module is not recognised"):
        parts.licence_of_module("some/module", {"LICENSE": "All rights reserved."})


def fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+): (.*)$", text, re.M))


@pytest.mark.skipif(any(shutil.which(tool) is None for tool in debian.TOOLS), reason="needs dpkg-dev")
def test_debian_packages(usr: pathlib.Path, found: list[parts.Part], tmp_path: pathlib.Path) -> None:
    made = debian.write_packages(usr, found, COMMIT, tmp_path)
    architecture, triplet = debian.ARCHITECTURES[platform.machine()]
    library = f"libdeepep{facts.version().split('.')[0]}"
    packages = {path.name.split("_")[0]: path for path in made}
    assert sorted(packages) == sorted([library, "libdeepep-dev", "deepep-tools"])
    listed = {name: facts.run("dpkg-deb", "--contents", path) for name, path in packages.items()}
    folder = f"./usr/lib/{triplet}"
    assert f"{folder}/{BUILD.library.name}\n" in listed[library] and f"{folder}/libdeepep_cpu.so\n" in listed[library]
    assert f"{folder}/libdeepep.so -> {BUILD.library.name}\n" in listed["libdeepep-dev"]
    assert (
        f"{folder}/pkgconfig/deepep.pc\n" in listed["libdeepep-dev"]
        and "./usr/include/deepep.h" in listed["libdeepep-dev"]
    )
    assert "./usr/bin/deepep\n" in listed["deepep-tools"]
    assert "./usr/share/man/man1/deepep.1.gz\n" in listed["deepep-tools"]
    assert all(" root/root " in line for text in listed.values() for line in text.splitlines())
    control = {name: fields(facts.run("dpkg-deb", "--field", path)) for name, path in packages.items()}
    assert {text["Architecture"] for text in control.values()} == {architecture}
    assert "libc6 (>= " in control[library]["Depends"] and "libc6" in control["deepep-tools"]["Depends"]
    same = f"{library} (= {facts.version()}-{debian.REVISION})"
    assert same == control["libdeepep-dev"]["Depends"] and same in control["deepep-tools"]["Depends"]
    symbols = facts.run("dpkg-deb", "--info", packages[library], "symbols")
    assert f"{BUILD.library.name} {library} #MINVER#" in symbols and " deepep_version@" in symbols
    facts.run("dpkg-deb", "--extract", packages["libdeepep-dev"], tmp_path / "dev")
    text = (tmp_path / "dev" / folder / "pkgconfig" / "deepep.pc").read_text()
    assert f"prefix=/usr\nlibdir=${{prefix}}/lib/{triplet}\nincludedir=${{prefix}}/include\n" in text


def test_notes_take_figures_and_changes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "one.whl"
    file.write_bytes(bytes(2_500_000))
    text = notes.write_notes([file], COMMIT, tmp_path).read_text()
    assert "| `one.whl` | 2.50 MB |" in text
    performance = (ROOT / "docs" / "performance.md").read_text()
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "| file |" not in line and "one.whl" not in line
    ]
    assert len(rows) > 15 and [row for row in rows if row not in performance] == []
    changelog = "# C\n\n## Unreleased\n\n- new\n\n## 1.2.3 (today)\n\n- old\n\n## 1.2.2\n\n- older\n"
    assert notes.changes(changelog, "1.2.3") == "### After 1.2.3, in this build\n\n- new\n\n### 1.2.3\n\n- old"
    with pytest.raises(facts.ReleaseError, match="no section on 9.9.9"):
        notes.changes("# C\n", "9.9.9")


def test_a_changed_tree_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    tree = tmp_path / "tree"
    (tree / "tools").mkdir(parents=True)
    shutil.copytree(ROOT / "tools" / "release", tree / "tools" / "release")
    shutil.copy(ROOT / "tools" / "build_native.py", tree / "tools")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    (tree / "tools" / "release" / "new.py").write_text("")
    command = [sys.executable, "-B", "-m", "release", "begin", "--dist", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tree / "tools", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "make release: the tree has changes that are in no commit: tools/release/new.py\n"


def test_compressed_bytes_have_no_time(tmp_path: pathlib.Path) -> None:
    archives.compress(b"text", tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"text"
