"""Make the pictures of docs/web.md: python scripts/screenshots.py

A real `holdfast web` shows the scene of the tests (tests/web/scene.py) in Debian's chromium. The scene is in /srv/app
and on a host called app1: as root, this program gives itself mount and host names of its own for that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
PLACE, HOST = Path("/srv/app"), "app1"
MAX_BYTES = 150_000
WIDE, NARROW = {"width": 1120, "height": 760}, {"width": 400, "height": 760}

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "web")]


def main() -> int:
    if os.geteuid() != 0:
        print("The pictures need root, for mount and host names of their own.", file=sys.stderr)
        return 1
    if socket.gethostname() != HOST:
        script = f'mount -t tmpfs none /srv && hostname {HOST} && mkdir -p {PLACE} && exec "$@"'
        command = ["unshare", "--mount", "--uts", "sh", "-ec", script, "-", sys.executable, __file__]
        return subprocess.run(command, check=False).returncode
    take_all()
    return 0


def take_all() -> None:
    from browser import start_chromium
    from console_server import ConsoleServer, slug
    from scene import Scene

    words = [PLACE, "--allow-actions", "--audit-log", "/srv/audit.jsonl"]
    with Scene(PLACE) as scene, ConsoleServer(*words) as server, start_chromium() as browser:
        jobs, shop = slug(server, "queue"), slug(server, "store")

        def take(name: str, path: str, scheme: str = "light", size: dict[str, int] = WIDE, **options: int) -> None:
            context = browser.new_context(viewport=size, color_scheme=scheme, timezone_id="UTC")
            page = context.new_page()
            page.goto(server.at(path))
            page.wait_for_selector("main > h1, main > .confirm")
            if "confirm" not in path:
                page.wait_for_selector("#live[data-state=live]")
            if options:
                page.mouse.wheel(0, options["scroll"])
                page.wait_for_timeout(300)
            file = PICTURES / f"web-{name}.png"
            page.screenshot(path=str(file))
            context.close()
            print(f"{file.name}: {file.stat().st_size // 1000} kB")
            assert file.stat().st_size < MAX_BYTES

        take("overview", "/")
        take("queue-dark", jobs, "dark")
        take("queue-narrow", jobs, size=NARROW)
        take("task", f"{jobs}/task?id=mail-17")
        take("events", shop)
        take("events-narrow-dark", shop, "dark", NARROW, scroll=380)
        take("confirm", f"{jobs}/confirm?action=retry&state=failed", size={"width": 1120, "height": 420})
        lock = f"/lock?name={quote(str(PLACE / 'build.lock'))}"
        context = browser.new_context(viewport=WIDE, color_scheme="light")
        page = context.new_page()
        page.goto(server.at(lock))
        page.wait_for_selector("#live[data-state=live]")
        scene.build.end()
        page.wait_for_selector(".timeline >> text=acquired by")
        page.screenshot(path=str(PICTURES / "web-lock.png"))


if __name__ == "__main__":
    sys.exit(main())
