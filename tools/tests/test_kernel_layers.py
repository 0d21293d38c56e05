"""The chapters of kernels/cpu include only those that runtime/base.h lists before them."""

import pathlib
import re

CPU = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "cpu"


def test_include_order() -> None:
    listed = re.findall(r"^//   (\w+(?:, \w+)*)  ", (CPU / "runtime" / "base.h").read_text(), re.MULTILINE)
    order = {chapter: place for place, line in enumerate(listed) for chapter in line.split(", ")}
    assert set(order) == {path.name for path in CPU.iterdir() if path.is_dir()}
    upward = [
        f"{path.relative_to(CPU)} includes {chapter}"
        for path in sorted(CPU.glob("*/*"))
        for chapter in re.findall(r'^#include "cpu/(\w+)/', path.read_text(), re.MULTILINE)
        if chapter != path.parent.name and order[chapter] >= order[path.parent.name]
    ]
    assert upward == []
