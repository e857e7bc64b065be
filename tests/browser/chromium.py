"""A headless Chromium, driven through a pair of pipes with nothing but the standard library.

It is looked for at $CHROMIUM, then under its usual names; `apt-get install chromium` brings one.
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's program, None if there is none."""
    if os.environ.get("CHROMIUM"):
        return os.environ["CHROMIUM"]
    for name in NAMES:
        program = shutil.which(name)
        if program:
            return program
    return None


class Page:
    """A tab. Whatever the page writes to the console as an error, or throws, is kept in `errors`."""

    def __init__(self, send: int, receive: int):
        self.send = send  # the descriptor that commands are written to
        self.receive = receive  # the one that messages are read from
        self.rest = b""  # of what was read, the beginning of the next message
        self.count = 0  # commands so far
        self.session = None
        self.loaded = False
        self.errors = []
        self.requests = []  # the addresses that the page has asked for

        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def read(self) -> dict:
        """The next message; an error on the page is noted."""
        while b"\0" not in self.rest:
            data = os.read(self.receive, 1 << 16)
            assert data, "the browser has ended"
            self.rest += data
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        method = message.get("method")
        about = message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(about)
        if method in ("Log.entryAdded", "Runtime.consoleAPICalled"):
            level = about.get("type") or about["entry"]["level"]
            if level in ("error", "assert", "warning"):
                self.errors.append(about)
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        self.loaded |= method == "Page.loadEventFired"
        return message

    def call(self, method: str, **params) -> dict:
        """One command of the DevTools protocol, and its answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        answer = self.read()
        while answer.get("id") != self.count:
            answer = self.read()
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 800) -> None:
        """A file from the disk, in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self.read()

    def run(self, script: str):
        """The value of an expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up again."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def click(self, x: float, y: float) -> None:
        """The left mouse button, at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, top: float, bottom: float, width: int) -> None:
        """A strip of the page, between two heights, as a PNG."""
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a browser with an empty profile in a folder; ended afterwards."""
    read, send = os.pipe()
    receive, write = os.pipe()

    def connect() -> None:  # the browser reads from descriptor 3 and writes to 4
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        for end, place in zip(high, (3, 4), strict=True):
            os.dup2(end, place)

    process = subprocess.Popen(
        [find(), *FLAGS, f"--user-data-dir={folder}"],
        preexec_fn=connect,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        yield Page(send, receive)
    finally:
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)
