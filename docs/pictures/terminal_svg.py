"""Draws coloured terminal output as SVG: `CLICOLOR_FORCE=1 deepep top --once | python3 terminal_svg.py > top.svg`."""

import html
import re
import sys

COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "90": "#8b949e"}
CELL, LINE, MARGIN = 8.43, 18, 16


def spans(line: str):
    """Yields (column, text, style) of a line with colour escapes."""
    column, style = 0, {}
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b["):
            for code in part[2:-1].split(";"):
                if code in ("", "0"):
                    style = {}
                elif code == "1":
                    style = {**style, "font-weight": "bold"}
                elif code in COLOURS:
                    style = {**style, "fill": COLOURS[code]}
        elif part:
            yield column, part, style
            column += len(part)


def main() -> None:
    lines = sys.stdin.read().rstrip("\n").split("\n")
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    width = max(map(len, plain)) * CELL + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">')
    print('<rect width="100%" height="100%" rx="8" fill="#0d1117"/>')
    print('<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" fill="#e6edf3" xml:space="preserve">')
    for row, line in enumerate(lines):
        for column, text, style in spans(line):
            if text.strip():
                attributes = "".join(f' {name}="{value}"' for name, value in style.items())
                x, y = MARGIN + column * CELL, MARGIN + row * LINE + 13
                print(f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * CELL:.1f}"{attributes}>{html.escape(text)}</text>')
    print("</g></svg>")


if __name__ == "__main__":
    main()
