#!/usr/bin/env python3
"""Open a page of `tessera report` in headless Chromium: no console message, the charts are there.

usage: scripts/check-report.py REPORT.html [--charts N] [--shots FOLDER]

--shots leaves pictures, 1280 and 400 pixels wide, dark and light, to look at. Exit code 0 also where
there is no Chromium, with a line that says so. Standard library only.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

COMMON = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
          "--enable-logging=stderr", "--virtual-time-budget=2000"]
# A narrow window is wider than it was asked for; a frame is not.
FRAME = """<!DOCTYPE html><style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe src="{url}" width="{width}" height="{height}"></iframe>"""


def browse(browser, args, profile):
    done = subprocess.run([browser, *COMMON, f"--user-data-dir={profile}", *args], check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    text = done.stderr.decode(errors="replace")
    said = [line for line in text.splitlines() if "CONSOLE" in line]
    if done.returncode != 0 or said:
        sys.exit("check-report: " + ("\n".join(said) or text[-2000:]))
    return done.stdout.decode(errors="replace")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("page")
    p.add_argument("--charts", type=int, default=5, help="how many there must be at least")
    p.add_argument("--shots", metavar="FOLDER")
    args = p.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                   None)
    size = os.path.getsize(args.page)
    if size >= 1 << 20:
        sys.exit(f"check-report: {args.page} has {size} bytes, 1 MiB or more")
    if browser is None:
        print("check-report: skipped, no Chromium")
        return
    if args.shots:
        os.makedirs(args.shots, exist_ok=True)
    url = pathlib.Path(args.page).resolve().as_uri()
    with tempfile.TemporaryDirectory() as profile:
        dom = re.sub(r"(?s)<script.*?</script>", "", browse(browser, ["--dump-dom", url], profile))
        charts = len(re.findall(r'<svg[^>]*role="img"', dom))
        marks = len(re.findall(r"<(rect|path)\b", dom))
        tables = dom.count("<caption")
        if charts < args.charts or tables < 4 or marks < 20:
            sys.exit(f"check-report: {charts} charts, {marks} marks, {tables} tables")
        if re.search(r"\b(?:NaN|undefined|Infinity)\b", dom):
            sys.exit("check-report: a NaN or an undefined in the page")
        for width, height in ((1280, 3900), (400, 5200)) if args.shots else ():
            for scheme, flag in (("light", "1"), ("dark", "0")):
                frame = pathlib.Path(profile, "frame.html")
                frame.write_text(FRAME.format(url=url, width=width, height=height), encoding="utf-8")
                shot = os.path.join(os.path.abspath(args.shots), f"report-{width}-{scheme}.png")
                browse(browser, [f"--blink-settings=preferredColorScheme={flag}",
                                 f"--window-size={max(width, 600)},{height}",
                                 f"--screenshot={shot}", frame.as_uri()], profile)
    print(f"check-report: {args.page}: {size} bytes, {charts} charts, {tables} tables, nothing on the "
          "console")


if __name__ == "__main__":
    main()
