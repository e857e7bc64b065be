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


LAYOUT = """(() => {
  const wrong = [], boxes = [], edge = document.documentElement.clientWidth;
  const name = (node) => `${node.tagName || node.parentNode.tagName} "${node.textContent.trim().slice(0, 30)}"`;
  if (document.documentElement.scrollWidth > edge) wrong.push("the page is wider than the window");
  for (const node of document.querySelectorAll("body *")) {
    const style = getComputedStyle(node);
    if (style.overflowX !== "visible" && node.tagName !== "svg" && node.scrollWidth > node.clientWidth + 1)
      wrong.push(`${name(node)} is cut off`);
    if (["BUTTON", "INPUT", "SELECT"].includes(node.tagName)) boxes.push([node, node.getBoundingClientRect()]);
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.textContent.trim() || node.parentNode.closest("script, option, details:not([open]) pre")) continue;
    const range = document.createRange(), svg = node.parentNode.closest("svg");
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.left < -1 || box.right > edge + 1) wrong.push(`${name(node)} leaves the window`);
      const around = svg && svg.getBoundingClientRect();
      if (around && (box.left < around.left - 1 || box.right > around.right + 1 || box.bottom > around.bottom + 1))
        wrong.push(`${name(node)} leaves its chart`);
      boxes.push([node, box]);
    }
  }
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (Math.min(across, down) > 2 && !a.contains(b) && !b.contains(a)) wrong.push(`${name(a)} overlaps ${name(b)}`);
  }));
  return [...new Set(wrong)].slice(0, 8);
})()"""
UNNAMED = (
    "[...document.querySelectorAll('button, input, select')].filter((node) => "
    "!(node.labels && node.labels.length) && !node.textContent.trim()).length"
)
