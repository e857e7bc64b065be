"""A tab of the browser that keeps what goes wrong on its page."""

from pathlib import Path


class Tab:
    """A tab. Errors and warnings on the page, and the addresses that it asks for, are kept."""

    def __init__(self, browser):
        self.page = browser.new_page()
        self.errors = []
        self.requests = []
        self.page.on("pageerror", lambda error: self.errors.append(error))
        self.page.on("console", self.note)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.run = self.page.evaluate  # the value of an expression, awaited if it is a promise

    def note(self, message) -> None:
        if message.type in ("error", "assert", "warning"):
            self.errors.append(message.text)

    def open(self, path: Path, width: int) -> None:
        """A file from the disk, in a window of this width."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.goto(path.resolve().as_uri())
