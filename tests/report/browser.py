"""Chromium without a window, driven through its own protocol over two pipes: no driver, no port, no further package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 60.0
_LOST_AFTER = 10.0
"""Seconds after which a click that changed nothing counts as lost."""
_MARK = """text => {
  document.querySelectorAll('[data-pressed]').forEach(node => node.removeAttribute('data-pressed'));
  const shows = node => node.innerText !== undefined && node.innerText.trim() === text;
  const node = [...document.querySelectorAll('body *')].filter(node => shows(node) && node.getClientRects().length
    && ![...node.children].some(shows) && !node.closest(':disabled')).pop();
  if (!node) return null;
  node.scrollIntoView({block: 'center', inline: 'center'});
  const box = node.getBoundingClientRect();
  const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (!top || !(node.contains(top) || top.contains(node))) return null;
  node.setAttribute('data-pressed', '');
  return `${box.x} ${box.y}`;
}"""
"""Marks the innermost visible element with a text for :meth:`Browser.press`, unless another covers it. Returns its place."""


def found_browser() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Close it."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
        arguments = [program, *switches, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        # The browser reads commands from descriptor 3 and writes to 4. The shell moves ours there.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.problems: list[str] = []
        """What the console of the page has said since the last `open`: errors, warnings, refused requests."""
        self.errors: list[str] = []
        """Of those the errors: exceptions, console.error, refused requests."""
        self.requests: list[str] = []
        """The addresses that the page has asked for since the last `open`."""
        self.failures: list[str] = []
        """The requests that failed since the last `open`: the answer was 400 or above, or there was none."""
        self._asked: dict[str, str] = {}
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page in pixels, and the colours that its user prefers."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, file: Path, fragment: str = "") -> None:
        """Load a file with the page of checkpoints, and wait until it is drawn."""
        self.visit(f"{file.resolve().as_uri()}{'#' if fragment else ''}{fragment}")
        self.wait_for("document.readyState === 'complete' && document.querySelectorAll('#tabs button').length > 0")

    def visit(self, url: str) -> None:
        """Load a page; a page that draws itself is not there yet, see :meth:`wait_for_texts`."""
        self._call("Page.navigate", url="about:blank")
        for noted in (self.problems, self.errors, self.requests, self.failures):
            noted.clear()
        self._asked.clear()
        self._call("Page.navigate", url=url)

    def wait_for(self, condition: str, seconds: float = _SECONDS) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + seconds
        while not self.value(condition):
            assert time.monotonic() < until, f"not true within {seconds:.0f} s: {condition}; the page said {self.problems}"
            time.sleep(0.05)

    def text(self) -> str:
        """The visible text of the page."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def wait_for_texts(self, *texts: str, seconds: float = _SECONDS) -> str:
        """Wait until all these texts are visible at once. Returns the whole visible text."""
        until = time.monotonic() + seconds
        while missing := [text for text in texts if text not in (shown := self.text())]:
            assert time.monotonic() < until, f"not visible within {seconds:.0f} s: {missing}; visible: {shown}"
            time.sleep(0.2)
        return shown

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        box = self.value(
            f"(() => {{const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]})()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, text: str, *, shows: str = "", hides: str = "", seconds: float = _SECONDS) -> None:
        """Click the element that shows exactly this text, until the click has had its effect.

        The element is clicked when it can be clicked and does not move; of several the last, as in a dialog. A page may draw an
        element again in the moment of a click, which is lost then.

        Args:
            text: The text of the element.
            shows: A text that the page shows after the click only.
            hides: A text that the page shows before the click only. With neither of them the element is clicked once.
            seconds: Longest time to wait.
        """
        until = time.monotonic() + seconds

        def done() -> bool:
            shown = self.text()
            return shows in shown and not (hides and hides in shown)

        clicked = False
        while not (clicked and done()):
            assert time.monotonic() < until, f"no effect of {text!r} within {seconds:.0f} s: {self.text()}"
            before = self.value(f"({_MARK})({json.dumps(text)})")
            time.sleep(0.2)
            if before is None or self.value(f"({_MARK})({json.dumps(text)})") != before:
                continue
            self.click("[data-pressed]")
            clicked = True
            again = time.monotonic() + _LOST_AFTER
            while not done() and time.monotonic() < again:
                time.sleep(0.1)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self._call("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        """Write what is to be seen as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {
            "id": number,
            "method": method,
            "params": parameters,
            **({"sessionId": self._session} if self._session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser has not answered for {_SECONDS:.0f} s"
            data = os.read(self._in, 1 << 20)
            assert data, f"the browser has ended with exit code {self._process.wait()}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self._said("error", details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled":
                self._said(parameters["type"], _text(parameters["args"]))
            case "Log.entryAdded":
                entry = parameters["entry"]
                self._said(entry["level"], f"{entry['text']} {entry.get('url', '')}".strip())
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
                self._asked[parameters["requestId"]] = parameters["request"]["url"]
            case "Network.responseReceived" if parameters["response"]["status"] >= 400:
                self.failures.append(f"{parameters['response']['status']} {parameters['response']['url']}")
            case "Network.loadingFailed" if not parameters.get("canceled"):
                asked = self._asked.get(parameters["requestId"], "an unknown address")
                self.failures.append(f"{parameters['errorText']} {asked}")

    def _said(self, level: str, text: str) -> None:
        self.problems.append(text)
        if level in ("error", "assert"):
            self.errors.append(text)


def _text(values: Sequence[dict[str, Any]]) -> str:
    return " ".join(str(each.get("value", each.get("description", ""))) for each in values)
