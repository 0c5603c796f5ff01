"""The page in a real browser, over the bundled target and over scripted text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from threading import Event

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from engines import BUNDLED_DRAFT, EngineConfig, EngineSlot
from engines.bench.passes import Passes
from engines.errors import ModelLoadError
from specdec_ui.layout import PageDefaults
from tests.conftest import write_tiny_model
from tests.specdec_ui.conftest import ScriptedBackend, ScriptedEngine, served

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "${window.hacked = 1}",
    "{{value}}",
    "`x`",
    "\\u{zz}",
    "</span></div>",
    "&lt;b&gt;",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=60_000)  # a run on the bundled target takes its time
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab that fails the test if a script of the page failed."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(120_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


@pytest.fixture(scope="module")
def bundled_slot() -> Iterator[EngineSlot]:
    slot = EngineSlot()
    slot.load(EngineConfig(draft=BUNDLED_DRAFT))
    yield slot
    slot.close()


@pytest.fixture(scope="module")
def bundled_page(bundled_slot: EngineSlot) -> Iterator[str]:
    with served(bundled_slot) as url:
        yield url


@pytest.fixture
def scripted(page: Page) -> Iterator[tuple[Page, ScriptedEngine]]:
    """The page, opened, over a scripted engine."""
    engine = ScriptedEngine()
    with served(EngineSlot(lambda name: ScriptedBackend(engine))) as url:
        open_page(page, url)
        yield page, engine


def open_page(page: Page, url: str, *, theme: str = "light") -> None:
    page.goto(f"{url}?__theme={theme}")
    expect(page.locator("#sd-run")).to_be_enabled()


def set_number(page: Page, label: str, value: float) -> None:
    field = page.get_by_label(label, exact=False).last
    field.fill(str(value))
    field.press("Tab")


def status(page: Page):
    return page.locator(".sd-status")


def lane(page: Page, side: str):
    return page.locator(f"#sd-lane-{side} .sd-text")


def kept_text(page: Page, side: str) -> str:
    """Return a lane's output as the person would copy it: without dropped drafts and marks."""
    return str(
        page.evaluate(
            """side => [...document.querySelectorAll(`#sd-lane-${side} .sd-text i`)]
                .filter(i => !['x', 'u', 'd'].includes(i.className))
                .map(i => [...i.childNodes].filter(n => n.nodeType == 3).map(n => n.data).join(''))
                .join('')""",
            side,
        )
    )


def test_a_recorded_run_is_on_screen_at_once_and_says_that_it_is_recorded(scripted):
    page, engine = scripted
    expect(page.locator(".sd-verdict")).to_contain_text("recorded run")
    expect(page.locator(".sd-verdict h2")).to_contain_text("output identical")
    assert kept_text(page, "speculative") == kept_text(page, "baseline") != ""
    assert engine.num_generations == 0


@pytest.mark.bundled
def test_a_comparison_on_the_bundled_target_shows_both_lanes_and_a_verdict(page, bundled_page):
    open_page(page, bundled_page)
    set_number(page, "max_new_tokens", 32)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    expect(page.locator(".sd-verdict")).to_contain_text("your run")
    expect(page.locator(".sd-verdict h2")).to_contain_text("output identical")
    assert kept_text(page, "speculative") == kept_text(page, "baseline")
    assert "lighthouse" in kept_text(page, "baseline")
    assert lane(page, "speculative").locator(".a").count() > 0
    assert lane(page, "baseline").locator(".a").count() == 0
    expect(page.locator(".sd-chart svg .bars .point")).to_have_count(6)
    expect(page.locator(".sd-figures")).to_contain_text("Acceptance rate")


@pytest.mark.bundled
def test_stop_ends_the_passes_keeps_what_came_and_the_next_run_works(
    page, bundled_page, bundled_slot
):
    passes = Passes()
    engine = bundled_slot.load(EngineConfig(draft=BUNDLED_DRAFT))  # the page's own
    target = engine.open_target
    engine.open_target = lambda capacity: passes.recording("target", target(capacity))
    open_page(page, bundled_page)
    page.get_by_role("button", name="Story").click()
    set_number(page, "max_new_tokens", 400)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("tokens in")
    expect(page.locator("#sd-run")).to_be_disabled()
    page.click("#sd-stop")
    expect(status(page)).to_contain_text("Stopped")
    num_passes = len(passes.calls)
    kept = kept_text(page, "speculative")
    assert kept
    page.wait_for_timeout(1500)  # many steps long
    # A pass on its way, and what it cuts back.
    assert len(passes.calls) <= num_passes + 2
    assert num_passes > 0
    del engine.open_target

    with page.expect_download() as download:
        page.get_by_text("Export this run").click()
    exported = download.value.path().read_text(encoding="utf-8").splitlines()
    assert '"specdec-recording"' in exported[0]
    assert sum('"type": "step"' in line for line in exported) > 0

    expect(page.locator("#sd-run")).to_be_enabled()
    set_number(page, "max_new_tokens", 8)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")


@pytest.mark.bundled
def test_a_run_without_a_baseline_claims_no_speedup(page, bundled_page):
    open_page(page, bundled_page)
    page.get_by_text("Sampling and comparison").click()
    page.get_by_label("Run the baseline").uncheck()
    set_number(page, "max_new_tokens", 8)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    expect(page.locator(".sd-verdict")).to_contain_text("no speedup is claimed")
    assert kept_text(page, "baseline") == ""


@pytest.mark.parametrize("text", HOSTILE)
def test_model_text_is_shown_as_it_is(scripted, text):
    page, engine = scripted
    engine.text = text
    set_number(page, "max_new_tokens", 6)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    assert kept_text(page, "speculative") == text * 6
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_that_quotes_hostile_text_shows_it_as_it_is(page, text):
    backend = ScriptedBackend(ScriptedEngine(), error=ModelLoadError(f"no model {text}"))
    with served(EngineSlot(lambda name: backend)) as url:
        open_page(page, url)
        page.locator("#sd-prompt textarea").fill(text)
        page.click("#sd-run")
        expect(page.locator(".sd-error")).to_have_text(f"no model {text}")
        assert page.evaluate("window.hacked") is None
        # The page stays usable, and what was shown and typed is still there.
        expect(page.locator("#sd-run")).to_be_enabled()
        expect(page.locator("#sd-stop")).to_be_disabled()
        assert page.locator("#sd-prompt textarea").input_value() == text
        assert kept_text(page, "speculative") != ""


def test_a_run_works_by_keyboard_alone(scripted):
    page, engine = scripted
    engine.step_s = 0.05
    page.locator("#sd-prompt textarea").focus()
    tab_to(page, "sd-run")
    page.keyboard.press("Enter")
    expect(page.locator("#sd-stop")).to_be_enabled()
    tab_to(page, "sd-stop")
    page.keyboard.press("Enter")
    expect(status(page)).to_contain_text("Stopped")
    engine.wait_for(lambda: engine.num_closed == engine.num_generations)


def tab_to(page: Page, element_id: str) -> None:
    for _ in range(40):
        if page.evaluate("document.activeElement.id") == element_id:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{element_id} is not reached by the Tab key")


def test_dropped_drafts_can_be_hidden(scripted):
    page, _ = scripted
    set_number(page, "max_new_tokens", 8)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    dropped = lane(page, "speculative").locator(".x").first
    expect(dropped).to_be_visible()
    page.get_by_label("Hide what was dropped").check()
    expect(dropped).to_be_hidden()


def test_copying_a_lane_gives_the_output_alone(scripted):
    page, engine = scripted
    engine.text = " word\n"
    set_number(page, "max_new_tokens", 4)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    copied = page.evaluate(
        """() => { getSelection().selectAllChildren(
            document.querySelector('#sd-lane-speculative .sd-text'));
            return getSelection().toString() }"""
    )
    assert copied.rstrip("\n") == (" word\n" * 4).rstrip("\n")


def test_a_replay_shows_steps_at_their_times_and_a_live_run_does_not_wait_for_them(scripted):
    page, _ = scripted
    step = lane(page, "baseline").locator(".s").last
    page.click("#sd-replay")
    assert step.evaluate("e => getComputedStyle(e).opacity") != "1"
    delay = step.evaluate("e => getComputedStyle(e).animationDelay")
    recorded = step.evaluate("e => parseFloat(e.style.getPropertyValue('--t'))")
    # Too short to be watched as it was, so it is slowed down, and the button says how much.
    slower = ceil(4 / recorded)
    assert float(delay.removesuffix("s")) == pytest.approx(recorded * slower, rel=1e-3)
    expect(page.locator("#sd-replay")).to_have_text(f"Replay side by side ({slower}x slower)")
    set_number(page, "max_new_tokens", 8)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    assert (
        lane(page, "baseline").locator(".s").last.evaluate("e => getComputedStyle(e).animationName")
        == "none"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window(page, theme, width):
    engine = ScriptedEngine(text=" incomprehensibilities" * 3)
    with served(EngineSlot(lambda name: ScriptedBackend(engine))) as url:
        page.set_viewport_size({"width": width, "height": 900})
        open_page(page, url, theme=theme)
        set_number(page, "max_new_tokens", 40)
        page.click("#sd-run")
        expect(status(page)).to_contain_text("Done")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")


def test_stop_while_loading_gives_the_page_back_when_the_load_has_ended(page):
    may_load = Event()

    class SlowBackend(ScriptedBackend):
        def load(self, config):
            assert may_load.wait(60)
            return super().load(config)

    engine = ScriptedEngine()
    with served(EngineSlot(lambda name: SlowBackend(engine))) as url:
        open_page(page, url)
        page.click("#sd-run")
        expect(status(page)).to_contain_text("Loading the models")
        page.click("#sd-stop")
        expect(status(page)).to_contain_text("Stopping")
        expect(page.locator("#sd-run")).to_be_disabled()
        may_load.set()
        expect(status(page)).to_contain_text("Stopped")
        page.click("#sd-run")
        expect(status(page)).to_contain_text("Done")
        assert engine.num_generations > 0


def test_a_second_tab_waits_and_then_runs(browser, scripted):
    page, engine = scripted
    engine.step_s = 0.05
    set_number(page, "max_new_tokens", 4000)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("tokens in")
    other = browser.new_page()
    open_page(other, page.url.partition("?")[0])
    set_number(other, "max_new_tokens", 8)
    other.click("#sd-run")
    expect(status(other)).to_contain_text("Waiting for the engine")
    page.click("#sd-stop")
    expect(status(page)).to_contain_text("Stopped")
    expect(status(other)).to_contain_text("Done")
    other.close()


def test_a_lane_follows_its_end_until_it_is_scrolled_back(scripted):
    page, engine = scripted
    engine.step_s = 0.02
    set_number(page, "max_new_tokens", 4000)
    page.click("#sd-run")
    text = lane(page, "speculative")
    page.wait_for_function("e => e.scrollHeight > 2 * e.clientHeight", arg=text.element_handle())
    from_end = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    assert text.evaluate(from_end) < 100
    text.evaluate("e => e.scrollTo(0, 0)")
    page.wait_for_timeout(300)
    assert text.evaluate("e => e.scrollTop") == 0
    page.click("#sd-stop")
    expect(status(page)).to_contain_text("Stopped")


@pytest.mark.parametrize("value", [0, -1, 1000, 2.5])
def test_a_bad_number_is_named_on_the_page(scripted, value):
    page, engine = scripted
    set_number(page, "num_draft_tokens", value)
    page.click("#sd-run")
    expect(page.locator(".sd-error")).to_contain_text(f"num_draft_tokens is {value}: use 1 to 32")
    assert engine.num_generations == 0


@pytest.fixture
def tuning_page(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Page, Path]]:
    """The page over the real back end, ready to tune a tiny target, and the folder it is for."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the child: its model is tiny
    target = write_tiny_model(tmp_path / "tiny-target", seed=1, num_layers=4)
    with served(EngineSlot(), PageDefaults(target=str(target), draft_kind="prompt_lookup")) as url:
        open_page(page, url)
        page.get_by_text("Tune a draft for this target").click()
        page.get_by_label("Output folder").fill(str(tmp_path / "draft"))
        set_number(page, "num_layers", 2)
        set_number(page, "minutes", 0.1)
        yield page, tmp_path / "draft"


def test_a_tuning_shows_its_curve_and_puts_the_draft_into_the_pair(tuning_page):
    page, folder = tuning_page
    page.click("#sd-tune")
    for name in ("run", "build", "tune"):
        expect(page.locator(f"#sd-{name}")).to_be_disabled()
    expect(status(page)).to_contain_text("phase 2 of 5")
    expect(page.locator("#sd-curve .scatterlayer .trace")).to_have_count(3)
    expect(page.locator("#sd-curve")).to_contain_text("Acceptance rate at temperature 1")
    expect(status(page)).to_contain_text("The draft is made")
    expect(page.get_by_role("radio", name="model", exact=True)).to_be_checked()
    expect(page.get_by_label("Draft model")).to_have_value(str(folder))
    expect(page.locator("#sd-tune-log")).to_contain_text("saved in")
    set_number(page, "max_new_tokens", 8)
    page.click("#sd-run")
    expect(status(page)).to_contain_text("Done")
    expect(page.locator(".sd-verdict")).to_contain_text("a draft model")


def test_a_tuning_that_is_stopped_gives_the_page_back_and_can_be_resumed(tuning_page):
    page, folder = tuning_page
    page.click("#sd-tune")
    expect(status(page)).to_contain_text("phase 3 of 5")
    page.click("#sd-stop")
    expect(status(page)).to_contain_text(f"kept in {folder}: tick Resume")
    for name in ("run", "build", "tune"):
        expect(page.locator(f"#sd-{name}")).to_be_enabled()
    expect(page.locator("#sd-stop")).to_be_disabled()
    resume = page.get_by_role("checkbox", name="Resume")
    resume.check()
    page.click("#sd-tune")
    expect(status(page)).to_contain_text("The draft is made")
    expect(resume).not_to_be_checked()
