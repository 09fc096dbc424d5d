"""The page at /dynaserve/ in a real Chromium, from the front-end's own routes over a state that stands still."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

pytest.importorskip("vllm")

from dynaserve import fleet_view
from dynaserve.local.fleet import free_ports
from tests import frontend_app, looked_at
from tests.looked_at import HOSTILE

KEY = "sesame"
PATIENCE_S = 30
pytestmark = pytest.mark.chromium


@dataclass
class Served:
    """A front-end whose state a test may change."""

    port: int
    snapshot: fleet_view.Snapshot = field(default_factory=looked_at.snapshot)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(keys: list[str], port: int | None = None) -> Iterator[Served]:
    served = Served(free_ports(1)[0] if port is None else port)
    app = FastAPI()
    asyncio.run(frontend_app.attach(app, keys, lambda: served.snapshot))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=served.port, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has ended"
        yield served
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Browser:
    driver: Any

    def open(self, served: Served) -> None:
        self.driver.get(f"{served.url}/dynaserve/")

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def each(self, selector: str, expression: str) -> list[Any]:
        """A JavaScript expression of each `e`, all in one moment: the page draws itself anew all the time."""
        found: list[Any] = self.driver.execute_script(
            f"return Array.from(document.querySelectorAll(arguments[0])).map(e => {expression})", selector
        )
        return found

    def texts(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.each(selector, "e.innerText")]

    def text(self, selector: str) -> str:
        return str(self.driver.execute_script("return document.querySelector(arguments[0]).textContent", selector))

    def until(self, script: str) -> None:
        """Waits for a JavaScript expression to become true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, PATIENCE_S).until(lambda driver: driver.execute_script(f"return {script}"), script)

    def until_shown(self) -> None:
        self.until("!document.getElementById('content').hidden")

    def errors(self) -> list[str]:
        """What the console has said since this was asked last, but for answers and connections that failed."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "Failed to load resource" not in message]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    folder: Path = tmp_path_factory.mktemp("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={folder}", "no-proxy-server"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: Any) -> Iterator[Browser]:
    browser = Browser(driver)
    driver.get("about:blank")
    browser.errors()
    yield browser
    assert browser.errors() == []


def test_it_shows_instances_requests_and_slo(browser: Browser) -> None:
    with serving([""]) as served:
        browser.open(served)
        browser.until_shown()
        rows = browser.texts("#instances tbody tr")
        assert len(rows) == 2
        assert rows[0].startswith("http://a:8000 up 3 1 25.0 % of 1600 tokens 0 prompt tokens + 3 decodes, 12.3 ms"), rows
        assert rows[1].startswith("http://b:8000 suspect - - - -"), rows
        assert len(browser.all("#instances tbody tr:first-child svg rect")) == 2
        assert browser.each("#instances .bar > span", "getComputedStyle(e).width")[0] == "32px", "a quarter of 128"
        assert browser.texts("#flows tbody tr") == ["http://a:8000 http://b:8000 2 8.0 kB"]
        assert "92.7 %" in browser.text("#slo"), "76 of 82 gaps"
        requests = browser.texts("#requests tbody tr")
        assert requests[1] == "cut finished 100 40 110 http://a:8000 http://b:8000 4.0 kB, 75.0 % early 250 ms 92.3 % 140 ms length"
        assert "2 running, 1 wait for their first token" in browser.text("#state")


def test_the_time_line_shows_the_cut(browser: Browser) -> None:
    """One row a request: what ran where, the cut between, KV as ticks, and what was lost."""

    def drawn(row: int) -> list[str]:
        return browser.each(f"#timeline g:nth-of-type({row}) > :is(rect, line)", "e.getAttribute('class')")

    with serving([""]) as served:
        browser.open(served)
        browser.until_shown()
        assert len(browser.all("#timeline g.request")) == 3
        assert drawn(1) == ["alpha"]
        assert drawn(2) == ["alpha", "gap", "beta", "chunk", "chunk", "cut"]
        assert drawn(3) == ["alpha", "gap", "beta", "alpha", "chunk", "chunk", "cut", "lost"]
        alpha, gap, beta = map(float, browser.each("#timeline g:nth-of-type(2) > rect", "e.getAttribute('width')"))
        assert alpha == pytest.approx(40 * gap, rel=0.01), "800 ms and 20 ms"
        assert beta == pytest.approx(54 * gap, rel=0.01), "1080 ms"
        colours = set(browser.each("#timeline g:nth-of-type(2) > rect", "getComputedStyle(e).fill"))
        assert len(colours) == 3


def test_it_follows_the_fleet(browser: Browser) -> None:
    with serving([""]) as served:
        browser.open(served)
        browser.until_shown()
        served.snapshot = fleet_view.snapshot("f", [], lambda _: "up", [], running=0, waiting=0, now_s=looked_at.NOW_S)
        browser.until("document.querySelectorAll('#instances tbody tr').length === 0")
        assert browser.all("#timeline g.request") == []


def test_text_of_clients_stays_text(browser: Browser) -> None:
    with serving([""]) as served:
        browser.open(served)
        browser.until_shown()
        assert browser.all("img") == []
        assert browser.driver.title == "DynaServe"
        titles = browser.each("#requests td:first-child", "e.title")
        assert titles[0] == HOSTILE


def test_it_says_when_the_front_end_is_away_and_goes_on_when_it_is_back(browser: Browser) -> None:
    with serving([""]) as served:
        browser.open(served)
        browser.until_shown()
    browser.until("document.getElementById('message').textContent !== ''")
    assert browser.text("#message") == "The front-end does not answer; below is what it said last."
    assert len(browser.all("#instances tbody tr")) == 2
    with serving([""], served.port):
        browser.until("document.getElementById('message').textContent === ''")


def test_it_asks_for_the_key_and_keeps_it_in_its_tab(browser: Browser) -> None:
    with serving([KEY]) as served:
        assert httpx.get(f"{served.url}/dynaserve/snapshot").status_code == 401
        browser.open(served)
        browser.until("!document.getElementById('login').hidden")
        assert browser.text("#message") == ""
        for key in ("wrong", KEY):
            (field,) = browser.all("#key")
            field.send_keys(key)
            browser.all("#login button")[0].click()
            if key == "wrong":
                browser.until("document.getElementById('message').textContent !== ''")
                assert browser.text("#message") == "The front-end does not take this API key."
        browser.until_shown()
        assert browser.driver.execute_script("return [Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            [KEY],
            0,
            "",
        ]
        browser.driver.refresh()
        browser.until_shown()
        assert browser.all("#login")[0].is_displayed() is False


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes(browser: Browser, scheme: str) -> None:
    with serving([""]) as served:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.open(served)
        browser.until_shown()
        (body,) = browser.all("body")
        ground, ink = (sum(map(float, body.value_of_css_property(name)[5:-1].split(",")[:3])) for name in ("background-color", "color"))
        assert (ground > ink + 500) if scheme == "light" else (ink > ground + 500)


def test_nothing_but_the_page_itself_may_run(browser: Browser) -> None:
    with serving([""]) as served:
        policy = httpx.get(f"{served.url}/dynaserve/").headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        browser.open(served)
        browser.until_shown()
        script = "const s = document.createElement('script'); s.textContent = 'document.title = \"owned\"'; document.body.append(s)"
        browser.driver.execute_script(script)
        assert browser.driver.title == "DynaServe"
        (refused,) = browser.errors()
        assert "Content Security Policy" in refused
