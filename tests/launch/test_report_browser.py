"""Reports in a browser: quiet, offline, readable on a phone and on a desktop, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_folders import nasty_run, whole_run, write_completions

from alignment.reporting.html.page import render, render_comparison
from alignment.reporting.run_content import read_content

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
pytestmark = [pytest.mark.ci, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")]
WIDTHS = {"phone": 390, "desktop": 1440}
# Every element with text of its own: what it says, its contrast with what is behind it, and its size in pixels.
TEXTS = """() => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = channels(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].filter(n => n.nodeType === 3 && n.textContent.trim());
    if (!own.length) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const [one, two] = [luminance(channels(svg ? style.fill : style.color)), luminance(behind(element))];
    const scale = svg ? element.getScreenCTM().a : 1;
    found.push({
      text: own[0].textContent.trim().slice(0, 60),
      contrast: (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05),
      size: parseFloat(style.fontSize) * scale,
    });
  }
  return found;
}"""
OUTSIDE = """() => [...document.body.querySelectorAll('*')].filter(e => {
  const box = e.getBoundingClientRect();
  return !e.closest('.scroll') && box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map(e => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    whole_run(folder / "whole")
    rows = [{"step": step, "prompt": "p " * 300, "policy": "long" * 200, "reference": "r"} for step in (0, 9)]
    write_completions(folder / "whole", rows)
    nasty_run(folder / "nasty")
    one, other = (read_content(folder / name) for name in ("whole", "nasty"))
    texts = {"run": render(one), "nasty": render(other), "comparison": render_comparison([one, other, one])}
    found = {name: folder / f"{name}.html" for name in texts}
    for name, path in found.items():
        path.write_text(texts[name])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "nasty", "comparison"])
def test_a_report(name: str, width: str, scheme: str, pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: said.append(request.url))
    page.goto(pages[name].as_uri())
    assert [text for text in said if text != pages[name].as_uri() and not text.startswith("data:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    assert page.evaluate(OUTSIDE) == []
    texts = page.evaluate(TEXTS)
    assert len(texts) > 40
    assert [text for text in texts if text["contrast"] < 4.5] == []
    assert [text for text in texts if text["size"] < 8] == []
    drawings = page.locator("figure svg")
    assert drawings.count() == page.locator("figure").count() > 0
    for box in (drawings.nth(number).bounding_box() for number in range(drawings.count())):
        assert box is not None and box["width"] > 250 and box["height"] > 100
    page.close()


def test_the_theme_can_be_chosen(pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page(color_scheme="light")
    page.goto(pages["run"].as_uri())
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    page.get_by_label("Dark").check()
    assert page.evaluate(color) != light
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(color) == light
    page.close()
