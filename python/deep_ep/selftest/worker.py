"""The process of one rank of the self-test: runs the cases that the parent asks for and sends their results back."""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from .cases import list_cases
from .check import CheckError
from .rank import Rank


def serve(rank: int, options: Any, directory: str, connection: Connection) -> None:
    """Body of a rank process: receives numbers of cases, answers ("ok", figures) or ("failed", text)."""
    torch.set_num_threads(1)
    if options.num_nvl_peers:
        os.environ["DEEPEP_NUM_MAX_NVL_PEERS"] = str(options.num_nvl_peers)  # size hints ask there as well
    me = Rank(rank, options, directory, lambda: connection.send(("ok", None)))
    cases = list_cases(options)
    while True:
        try:
            number = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[str, Any] = ("ok", cases[number].run(me))
        except CheckError as error:
            answer = ("failed", str(error))
        except Exception as error:  # noqa: BLE001 - every failure becomes a line of the report
            place = traceback.extract_tb(error.__traceback__)[-1]
            answer = ("failed", f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})")
        try:
            connection.send(answer)
        except OSError:
            return
