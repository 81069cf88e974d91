"""The page of the server, in headless Chromium."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import triforce_tree
from scripts.checks.served import serving
from tests.support.processes.served import KEY, NAME, PATIENCE, TEMPLATE, metric, until
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

pytest.importorskip("selenium")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs the programs chromium and chromedriver"),
]
DOCUMENT = "The import statement is used to bring a module into a namespace. " * 8
LIMITS = Limits(waiting=1, batch=1, new_tokens=900)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # The sandbox needs a user other than root.
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_window_size(1200, 800)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(create_app(engine, Served(NAME, limits=LIMITS, body=2**20))) as (address, _):
        yield address


class Page:
    """The page as a person sees it."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get(f"{url}/")

    def at(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def script(self, code: str, *values: Any) -> Any:
        return self.browser.execute_script(code, *values)  # type: ignore[no-untyped-call]

    def ready(self) -> "Page":
        until(lambda: self.at("state").text == f"model {NAME}")
        return self

    def settings(self, **values: str) -> None:
        """Opens the settings, and changes some of them."""
        self.script("document.querySelector('details').open = true")
        for name, value in values.items():
            field = self.at(name)
            if field.tag_name == "select":
                field.find_element(By.CSS_SELECTOR, f"option[value={value}]").click()
            else:
                field.clear()
                field.send_keys(value, Keys.TAB)

    def ask(self, question: str) -> None:
        self.at("question").send_keys(question, Keys.ENTER)

    @property
    def texts(self) -> list[str]:
        """Returns the text of each message, spaces and all."""
        code = "return [...document.querySelectorAll('.message .text')].map((each) => each.textContent)"
        found: list[str] = self.script(code)
        return found

    @property
    def figures(self) -> str:
        return self.browser.find_elements(By.CLASS_NAME, "figures")[-1].text

    def ended(self) -> bool:
        return not self.at("stop").is_enabled()


def answered(engine: Engine, messages: list[tuple[str, str]], new: int) -> str:
    """Returns the greedy answer by the chat template of the tests."""
    prompt = "".join(f"{who}: {text}\n" for who, text in messages) + "assistant:"
    return str(engine.generate(prompt, max_new_tokens=new, do_sample=False).text)


def test_a_conversation_about_a_document(
    browser: webdriver.Chrome, url: str, engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "document.txt"
    file.write_text(DOCUMENT)
    page = Page(browser, url).ready()
    page.settings(temperature="0", most="40")
    page.at("file").send_keys(str(file))
    until(lambda: page.at("size").text == f"{len(DOCUMENT)} characters")
    first = f"{DOCUMENT.rstrip()}\n\nWhat is it used for?"
    for number, question in enumerate(["What is it used for?", "And then?"]):
        page.ask(question)
        until(lambda count=2 * (number + 1): len(page.texts) == count and page.ended() and page.texts[-1])
    one = answered(engine, [("user", first)], 40)
    two = answered(engine, [("user", first), ("assistant", one), ("user", "And then?")], 40)
    assert page.texts == ["What is it used for?", one, "And then?", two]
    left = page.script(
        "const talk = document.getElementById('talk');"
        "return talk.scrollHeight - talk.scrollTop - talk.clientHeight"
    )
    assert left < 60, "the end of the conversation is in sight"
    assert re.search(r"first token after \d+\.\d\d s · [\d.]+ tokens/s · 40 tokens", page.figures)
    assert re.search(r"\d+ % target", page.figures)
    kinds = {each.get_attribute("class") for each in browser.find_elements(By.CSS_SELECTOR, ".text span")}
    # Which passes draft depends on how busy the machine is.
    assert "target" in kinds <= {"draft", "target"}
    coloured = browser.find_element(By.CSS_SELECTOR, ".text .target")
    assert coloured.get_attribute("title") == "proposed by the target"
    assert coloured.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
    page.at("colour").click()
    assert coloured.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
    page.at("anew").click()
    assert page.texts == []
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_a_reply_can_be_stopped(browser: webdriver.Chrome, url: str, way: str) -> None:
    page = Page(browser, url).ready()
    page.settings(mode="continue", temperature="0.9", most="900")
    before = metric(url, 'sequences_total{outcome="cancelled"}')
    page.ask(DOCUMENT)
    until(lambda: len(page.texts) == 2 and len(page.texts[1]) > 20)
    if way == "button":
        page.at("stop").click()
    else:
        page.at("question").send_keys(Keys.ESCAPE)
    until(page.ended)
    assert page.figures.endswith("stopped")
    assert page.at("wrong").text == ""
    shown = page.texts
    # The server has ended it too, and the page takes no more of it.
    until(lambda: metric(url, 'sequences_total{outcome="cancelled"}') > before)
    assert page.texts == shown
    assert page.at("send").is_enabled()


def test_what_goes_wrong_is_said_in_plain_words(browser: webdriver.Chrome, url: str, tmp_path: Path) -> None:
    page = Page(browser, url).ready()
    wrong = page.at("wrong")
    page.ask("")
    assert wrong.text == "Write a question first."
    page.script("document.getElementById('document').value = 'x'.repeat(3 * 2 ** 20)")
    page.ask("What is it about?")
    until(lambda: wrong.text.startswith("The document is too long for this server"))
    # Nothing was said, and the question can be sent again.
    assert page.texts == []
    assert page.at("question").get_attribute("value") == "What is it about?"
    page.script("document.getElementById('document').value = ''")
    page.settings(most="100000")
    page.at("question").send_keys(Keys.ENTER)
    until(lambda: "more than the 900 that this server generates" in wrong.text)
    binary = tmp_path / "picture.txt"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    page.at("file").send_keys(str(binary))
    until(lambda: wrong.text.startswith("picture.txt is no text in UTF-8"))


def test_a_server_with_a_key(browser: webdriver.Chrome, engine: Engine) -> None:
    with serving(create_app(engine, Served(NAME, KEY, LIMITS))) as (url, _):
        page = Page(browser, url)
        until(lambda: page.at("state").text == "ready; enter the API key under Settings")
        page.ask("Hello")
        assert page.at("wrong").text == "The server is not ready, or the key is missing."
        page.settings(key=KEY, most="8")
        page.ready()
        page.at("question").send_keys(Keys.ENTER)
        until(lambda: len(page.texts) == 2 and page.ended())
        page.settings(key="sk-other")
        page.ask("Again")
        until(lambda: page.at("wrong").text == "The key is wrong or missing. Enter it under Settings.")
        page.script("sessionStorage.clear()")


def test_a_server_that_is_not_ready_or_gone(browser: webdriver.Chrome, engine: Engine) -> None:
    loaded: Future[Engine] = Future()
    with serving(create_app(loaded, Served(NAME, limits=LIMITS))) as (url, _):
        page = Page(browser, url)
        until(lambda: page.at("state").text == "not ready: the model is being loaded")
        loaded.set_result(engine)
        page.ready()
    page.ask("Is somebody there?")
    until(lambda: page.at("wrong").text.startswith("The connection to the server was lost."))


def test_a_model_without_conversations(browser: webdriver.Chrome) -> None:
    own = triforce_tree.load(device="cpu", levels=1)
    assert own.tokenizer is not None
    assert own.tokenizer.chat_template != TEMPLATE
    with serving(create_app(own, Served(NAME, limits=LIMITS))) as (url, _):
        page = Page(browser, url).ready()
        page.settings(most="8")
        page.ask("Hello")
        until(lambda: "Choose “continue the text” under Settings." in page.at("wrong").text)
        page.settings(mode="continue")
        page.at("question").send_keys(Keys.ENTER)
        until(lambda: len(page.texts) == 2 and page.ended())
        assert page.at("wrong").text == ""


def test_every_field_has_a_name_and_is_reached_by_the_keyboard(browser: webdriver.Chrome, url: str) -> None:
    page = Page(browser, url).ready()
    page.script("document.querySelector('details').open = true")
    fields = browser.find_elements(By.CSS_SELECTOR, "input, textarea, select, button, [tabindex='0']")
    assert all(field.accessible_name for field in fields)
    wanted = {field.get_attribute("id") for field in fields if field.is_enabled()}
    reached: list[str] = []
    page.script("document.body.focus()")
    for _ in range(len(wanted) + 6):
        webdriver.ActionChains(browser).send_keys(Keys.TAB).perform()
        focused = browser.switch_to.active_element
        reached.append(focused.get_attribute("id") or "")
        # Whoever uses the keyboard sees where it is.
        if focused.tag_name != "body":
            assert focused.value_of_css_property("outline-style") != "none"
    assert wanted <= set(reached)
    roles = {each.aria_role for each in browser.find_elements(By.CSS_SELECTOR, "[role]")}
    assert {"log", "alert", "status"} <= roles


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: webdriver.Chrome, url: str, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page = Page(browser, url).ready()
    page.script("document.getElementById('wrong').textContent = 'something'")
    code = """
    const found = [];
    const texts = "h1, h2, label, span, button, textarea, summary, #wrong";
    for (const each of document.querySelectorAll(texts)) {
      let behind = each;
      while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
      if (!each.disabled) {
        const name = each.id || each.textContent.slice(0, 20);
        found.push([name, getComputedStyle(each).color, getComputedStyle(behind).backgroundColor]);
      }
    }
    return found;
    """
    found = page.script(code)
    assert len(found) > 15
    assert {name: _contrast(*colours) for name, *colours in found if _contrast(*colours) < 4.5} == {}
    back = page.script("return getComputedStyle(document.body).backgroundColor")
    assert (_luminance(back) < 0.2) == (scheme == "dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def _luminance(colour: str) -> float:
    """Returns the relative luminance of WCAG."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(colour: str, behind: str) -> float:
    light, dark = sorted((_luminance(colour), _luminance(behind)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_phone_shows_all_of_it(browser: webdriver.Chrome, url: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page = Page(browser, url).ready()
        page.settings(mode="continue", most="30")
        page.ask("A" * 300)
        until(lambda: len(page.texts) == 2 and page.ended())
        width, shown = page.script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= shown == 390
        sizes = page.script(
            "return [...document.querySelectorAll('input, textarea, select, button')]"
            ".map((each) => parseFloat(getComputedStyle(each).fontSize))"
        )
        # A phone enlarges the page around fields of smaller letters.
        assert min(sizes) >= 16
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_is_one_file_that_needs_no_other(url: str) -> None:
    with urlopen(f"{url}/", timeout=PATIENCE) as reply:
        text, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.findall(r"https?://|@import|<link[^>]*stylesheet|<script[^>]*src", text)
