"""Ways to start a group without torch.distributed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import _abi
from .errors import check_int, type_error, value_error

CALLBACK, TCP, FILE = _abi.BOOTSTRAP_CALLBACK, _abi.BOOTSTRAP_TCP, _abi.BOOTSTRAP_FILE
JOIN = _abi.BOOTSTRAP_JOIN


@dataclass(frozen=True)
class Bootstrap:
    """Where the ranks of a group meet. Made with `tcp`, `file` or `from_env`, given to ``Buffer(bootstrap=...)``.

    Each of them raises DeepEPError (also a ValueError or TypeError) for a wrong argument.

    Attributes:
        kind: "tcp" or "file".
        rank: this process's rank, 0 <= rank < size.
        size: ranks of the group.
        address: "host:port" of rank 0, which listens there (tcp).
        directory: a folder that all ranks see (file).
        name: distinguishes groups that meet at the same place. tcp: also the secret by which ranks are let in, which
            is never sent; whoever knows it can join. With DEEPEP_INTERFACE the default is refused: take a random one.
    """

    kind: str
    rank: int
    size: int
    address: str = ""
    directory: str = ""
    name: str = "default"

    def __post_init__(self) -> None:
        if self.kind not in ("tcp", "file"):
            raise value_error("kind", repr(self.kind), "'tcp' or 'file'")
        object.__setattr__(self, "size", check_int("size", self.size, 1))
        object.__setattr__(self, "rank", check_int("rank", self.rank))
        if not 0 <= self.rank < self.size:
            raise value_error("rank", self.rank, f"0 <= rank < size = {self.size}")
        for field in ("address", "directory", "name"):
            text = getattr(self, field)
            if not isinstance(text, str):
                raise type_error(field, repr(text), "a str")
            if "\0" in text:  # C would read it up to there
                raise value_error(field, repr(text), "a text without NUL")

    @classmethod
    def tcp(cls, rank: int, size: int, address: str, name: str = "default") -> Bootstrap:
        """Meets at a TCP address ("host:port"), where rank 0 listens."""
        return cls("tcp", rank, size, address=address, name=name)

    @classmethod
    def file(cls, rank: int, size: int, directory: str | os.PathLike[str], name: str = "default") -> Bootstrap:
        """Meets in a folder that all ranks see."""
        try:
            path = os.fsdecode(directory)
        except TypeError:
            raise type_error("directory", repr(directory), "a str or a path") from None
        return cls("file", rank, size, directory=path, name=name)

    @classmethod
    def from_env(cls, name: str = "default") -> Bootstrap:
        """Takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.

        Raises:
            DeepEPError (also a ValueError): a variable is missing; the text names it.
        """
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(v)]
        if missing:
            raise value_error(
                "environment", f"no {', '.join(missing)}", "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set"
            )
        env = os.environ
        for variable in ("RANK", "WORLD_SIZE"):
            if not env[variable].strip().isdecimal():
                raise value_error("environment", f"{variable}={env[variable]!r}", "an int >= 0")
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        return cls.tcp(int(env["RANK"]), int(env["WORLD_SIZE"]), address, name)
