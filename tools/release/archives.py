"""Archives whose bytes depend on names, contents and modes of the files alone, and on a time that is given."""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import tarfile


def pack_tree(folder: pathlib.Path, prefix: str, epoch: int, target: pathlib.Path) -> None:
    """Packs all of `folder` into the .tar.gz `target`, below the folder `prefix`.

    Entries are sorted, belong to root and have the time `epoch` (seconds); a file's mode is 755 if its owner may run
    it, else 644.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in [folder, *sorted(folder.rglob("*"))]:
            name = pathlib.PurePosixPath(prefix, path.relative_to(folder).as_posix())
            entry = archive.gettarinfo(str(path), str(name))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = epoch
            entry.mode = 0o755 if entry.isdir() or entry.issym() or entry.mode & 0o100 else 0o644
            if entry.isreg() or entry.islnk():  # a file that shares its inode with another is a file all the same
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    compress(stream.getvalue(), target)


def compress(content: bytes, target: pathlib.Path) -> None:
    """Writes `content` to `target` as gzip without a name and a time."""
    with target.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write(content)


def set_modes_and_times(folder: pathlib.Path, epoch: int) -> None:
    """Gives all of `folder` the modes of a package (755 for folders and programs, else 644) and the time `epoch`."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
