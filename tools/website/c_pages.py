"""The reference of the C API: pages in reStructuredText made of include/deepep.h, one for each of its sections."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import c_header  # noqa: E402

SECTION = re.compile(r"^/\* -{4} (.+?) -+\s*\*/", re.M)
TYPEDEF = re.compile(r"^typedef (?!struct \w+ \{)([^;]*?)(\w+)(\)\([^;]*\))?;", re.M)
IDENTIFIER = re.compile(r"`([^`]+)`|\b(deepep_\w+)(?:\(\))?|(\*?\bDEEPEP_\w+\*?)")


@dataclasses.dataclass
class Item:
    """One entry: where it stands in the header, its name, and its text."""

    place: int
    name: str
    text: str


def escape(text: str) -> str:
    return re.sub(r"([\\*_|<>])", r"\\\1", text)


class Pages:
    """Reads a header and writes its pages."""

    def __init__(self, path: pathlib.Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.header = c_header.parse(self.text, path.name)
        # Comments as blanks: places stay, and a name in a comment is not taken for a declaration.
        self.code = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), self.text, flags=re.S)
        self.roles = {f.name: "func" for f in self.header.functions}
        self.roles |= {s.name: "struct" for s in self.header.structs}
        self.roles |= {
            name: "type" for name in re.findall(r"^typedef [^;{]*?\(?\*?(deepep_\w+)(?:\)\(|;)", self.code, re.M)
        }

    def prose(self, comment: str) -> str:
        """A comment in reStructuredText: names of the API become references, other code is set as code."""
        parts: list[str] = []
        end = 0
        for match in IDENTIFIER.finditer(comment):
            parts.append(escape(comment[end : match.start()]))
            quoted, name, constant = match.groups()
            role = self.roles.get(quoted or name or "")
            before = "\\ " if parts[-1] and not parts[-1][-1].isspace() else ""
            parts.append(
                f"{before}:c:{role}:`{quoted or name}`\\ " if role else f"{before}``{quoted or name or constant}``\\ "
            )
            end = match.end()
        text = "".join([*parts, escape(comment[end:])])
        return re.sub(r"\\ (?=[\s.,;:!?)\]]|$)", "", text)

    def place(self, pattern: str) -> int:
        found = re.search(pattern, self.code)
        assert found, f"{self.header.name}: no {pattern}"
        return found.start()

    def function(self, f: c_header.Function) -> Item:
        text, _, codes = f.comment.partition(" Returns: ")
        if f.comment.startswith("Returns: "):
            text, codes = "", f.comment.removeprefix("Returns: ")
        lines = [f".. c:function:: {f.result.strip()} {f.name}({f.arguments})", "", f"   {self.prose(text)}", ""]
        if codes:
            lines += [f"   :returns: {self.prose(codes)}", ""]
        return Item(self.place(rf"\b{f.name}\s*\("), f.name, "\n".join(lines))

    def struct(self, s: c_header.Struct) -> Item:
        rows: list[tuple[list[str], str]] = []
        for field in s.fields:
            star = "*" if field.type.endswith("*") else ""
            length = "" if field.length is None else f"[{field.length}]"
            spelt = f"{field.type.removesuffix('*').strip()} {star}{field.name}{length}"
            if rows and rows[-1][1] == field.comment and field.name != "struct_size" and len(rows) > 1:
                rows[-1][0].append(spelt)
            else:
                rows.append(([spelt], field.comment))
        lines = [f".. c:struct:: {s.name}", "", f"   {self.prose(s.comment)}", ""]
        macro = re.search(rf"#define (DEEPEP_\w+_INIT)\s*\\?\s*\{{sizeof\({s.name}\)", self.code)
        if macro:
            lines += [f"   Initialise with ``{macro[1]}``.", ""]
        lines += ["   .. list-table::", "      :widths: 35 65", "      :header-rows: 1", ""]
        lines += ["      * - field", "        - meaning"]
        for names, comment in rows:
            fields = "\n\n          ".join(f"| ``{name}``" for name in names).replace("\n\n", "\n")
            own = (
                "Size of the struct, by which the library knows its version."
                if names == ["uint32_t struct_size"]
                else ""
            )
            lines += [f"      * - {fields}", f"        - {self.prose(comment or own)}"]
        return Item(self.place(rf"typedef struct {s.name} \{{"), s.name, "\n".join([*lines, ""]))

    def enum(self, e: c_header.Enum) -> Item:
        first = e.constants[0].name
        prefix = "DEEPEP_" if first == "DEEPEP_OK" else "DEEPEP_OP_"
        place = self.place(rf"X\({first.removeprefix(prefix)}," if e.mapped else rf"\b{first}\s*=")
        lines = [self.prose(e.comment), "", ".. list-table::", "   :widths: 45 10 45", "   :header-rows: 1", ""]
        lines += ["   * - constant", "     - value", "     - meaning"]
        for constant in e.constants:
            meaning = "; ".join(part for part in (constant.text, constant.comment) if part)
            lines += [
                f"   * - .. c:macro:: {constant.name}",
                f"     - {constant.literal}",
                f"     - {self.prose(meaning)}",
            ]
        return Item(place, first, "\n".join([*lines, ""]))

    def typedefs(self) -> list[Item]:
        items = []
        for match in TYPEDEF.finditer(self.code):
            declared = re.sub(r"\s+", " ", match[0]).removesuffix(";").removeprefix("typedef ")
            pointer = re.search(r"\(\*(\w+)\)", declared)
            name = pointer[1] if pointer else declared.split()[-1].lstrip("*")
            above = re.search(r"/\*((?:(?!\*/).)*)\*/\s*\Z", self.text[: match.start()], re.S)
            comment = " ".join(re.sub(r"\n\s*\*", "\n", above[1]).split()) if above and "----" not in above[1] else ""
            items.append(Item(match.start(), name, f".. c:type:: {declared}\n\n   {self.prose(comment)}\n"))
        return items

    def define(self, c: c_header.Constant) -> Item:
        text = f".. c:macro:: {c.name}\n\n   ``{c.literal}``. {self.prose(c.comment)}\n"
        return Item(self.place(rf"#define {c.name}\b"), c.name, text)

    def items(self) -> list[Item]:
        header = self.header
        found = [self.function(f) for f in header.functions] + [self.struct(s) for s in header.structs]
        found += [self.enum(e) for e in header.enums] + self.typedefs()
        found += [self.define(c) for c in header.defines]
        return sorted(found, key=lambda item: item.place)

    def introduction(self) -> str:
        """The comment at the top of the header: it is written in paragraphs and lists already."""
        comment = re.match(r"/\*(.*?)\*/", self.text, re.S)
        assert comment
        lines = [re.sub(r"^ ?\* ?", "", line) for line in comment[1].split("\n")[1:]]
        lists = [line.removeprefix("  ") for line in lines]  # a list that stands in would be a quotation
        return "\n".join(re.match(" *", line)[0] + self.prose(line.strip()) for line in lists)  # type: ignore[index]

    def write(self, folder: pathlib.Path) -> list[str]:
        """Writes index.rst and a page a section; returns the names of all entries."""
        folder.mkdir(parents=True)
        sections = [(match.start(), match[1].strip()) for match in SECTION.finditer(self.text)]
        bounds = [0, *(place for place, _ in sections), len(self.text)]
        titles = ["Version", *(title for _, title in sections)]
        items, names = self.items(), []
        for title, start, end in zip(titles, bounds, bounds[1:], strict=False):
            inside = [item for item in items if start <= item.place < end]
            short = title.split(":")[0]
            name = re.sub(r"\W+", "-", short.lower())
            names.append(name)
            rule = "=" * len(short)
            rest = title.partition(":")[2].strip()
            lead = f"{rest[0].upper()}{rest[1:]}.\n\n" if rest else ""
            body = "\n".join(item.text for item in inside)
            (folder / f"{name}.rst").write_text(f"{short}\n{rule}\n\n{lead}{body}")
        tree = "\n".join(f"   {name}" for name in names[1:] + names[:1])
        title = "C: deepep.h"
        (folder / "index.rst").write_text(
            f"{title}\n{'=' * len(title)}\n\n{self.introduction()}\n\n.. toctree::\n   :maxdepth: 1\n\n{tree}\n"
        )
        return [item.name for item in items]
