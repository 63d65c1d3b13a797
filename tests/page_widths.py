"""How wide the pages of the built documentation are, and what they fetch from elsewhere, as headless Chromium says.

  mkdocs build --strict && python tests/page_widths.py site

Each page is shown in frames of a desktop's and a phone's width. Printed are pages that are wider than their frame, with
the element that reaches furthest, and addresses that are not the site's own.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

WIDTHS = (1280, 390)  # px
MEASURE = """
<!DOCTYPE html><title>widths</title><pre id="found"></pre><script>
const reaches = (frame, width) => {
  const inside = [...frame.contentDocument.body.querySelectorAll("*")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > width + 1;
  });
  return inside.slice(0, 3).map(element => element.outerHTML.slice(0, 120));
};
const measured = async (page) => {
  const frame = document.createElement("iframe");
  frame.style = `width: ${WIDTHS[0]}px; height: 800px; border: 0`;
  frame.src = "/" + page;
  const loaded = new Promise(resolve => frame.onload = resolve);
  document.body.append(frame);
  await loaded;
  const found = [];
  for (const width of WIDTHS) {
    frame.style.width = `${width}px`;
    await new Promise(resolve => setTimeout(resolve, 50));  // tables are wrapped by a script
    const root = frame.contentDocument.documentElement;
    const fetched = frame.contentWindow.performance.getEntriesByType("resource").map(each => each.name);
    found.push({
      page: page, window: width, width: Math.max(root.scrollWidth, frame.contentDocument.body.scrollWidth),
      reaches: reaches(frame, width), elsewhere: fetched.filter(name => !name.startsWith(location.origin)),
    });
  }
  frame.remove();
  return found;
};
(async () => {
  const all = [];
  for (const page of PAGES) all.push(...await measured(page));
  document.getElementById("found").textContent = JSON.stringify(all);
})();
</script>
"""


class Shown(NamedTuple):
    """A page in a frame of ``window`` px: how wide it is, what reaches beyond, what it fetches from elsewhere."""

    page: str
    window: int
    width: int
    reaches: list[str]
    elsewhere: list[str]


class _Site(SimpleHTTPRequestHandler):
    """The site's files, and the page that measures them."""

    def __init__(self, *args: object, measure: str, **kwargs: object) -> None:
        self.measure = measure
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """The page that measures, or a file."""
        if self.path != "/measure":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.measure.encode())
        return None

    def log_message(self, *args: object) -> None:
        """Nothing: hundreds of files are asked for."""


def chromium() -> str | None:
    """Chromium's program, or Chrome's."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def shown(site: Path, timeout_s: float = 240) -> list[Shown]:
    """Every page of ``site`` at every width."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("index.html"))
    measure = MEASURE.replace("WIDTHS", str([*WIDTHS])).replace("PAGES", json.dumps(pages))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, directory=str(site), measure=measure))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = chromium()
    if program is None:
        raise FileNotFoundError("Chromium is not installed.")
    try:
        with tempfile.TemporaryDirectory() as profile:
            command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
            command += [f"--virtual-time-budget={1000 * len(pages) * len(WIDTHS)}", "--dump-dom"]
            command += [f"http://127.0.0.1:{server.server_address[1]}/measure"]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s).stdout
    finally:
        server.shutdown()
        server.server_close()
    found = re.search(r'<pre id="found">(.+?)</pre>', said, re.S)
    if not found:
        raise RuntimeError("Chromium did not get through all pages.")
    return [Shown(**each) for each in json.loads(html.unescape(found[1]))]


def main() -> None:
    """Print what is too wide, or from elsewhere."""
    all_shown = shown(Path(sys.argv[1]))
    for each in all_shown:
        if each.width > each.window:
            print(f"{each.page} is {each.width} px wide in a window of {each.window}:", *each.reaches, sep="\n    ")
        for address in each.elsewhere:
            print(f"{each.page} fetches {address}")
    print(f"{len(all_shown) // len(WIDTHS)} pages at {' and '.join(map(str, WIDTHS))} px")


if __name__ == "__main__":
    main()
