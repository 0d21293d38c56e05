"""Takes the picture of the site's start page: picture.py SITE FILE.png. Needs a Chromium (Debian: chromium)."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def take(page: pathlib.Path, file: pathlib.Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("picture: needed: a Chromium (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        raw = pathlib.Path(folder) / "raw.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1400,900",
        ]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={raw}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        Image.open(raw).convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    take(pathlib.Path(sys.argv[1]) / "index.html", pathlib.Path(sys.argv[2]))
