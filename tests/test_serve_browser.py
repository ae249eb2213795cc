"""The page in Chromium: by mouse, by keyboard only, on a phone, in light and dark.

Without Chromium the tests are skipped; ``PROBPROMPT_BROWSER=required`` makes that a failure.
"""

import base64
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from probprompt.classifier.store import Store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FileChooser, FilePayload, JSHandle, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
Emoji = dict[str, dict[str, list[bytes]]]
Open = Callable[..., Any]
Serve = Callable[..., Any]
LEARNING = 60_000  # milliseconds that a lesson may take


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The system's Chromium."""
    unavailable = pytest.fail if os.environ.get("PROBPROMPT_BROWSER") == "required" else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("Playwright is not installed: pip install playwright")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        unavailable(f"Chromium not found (looked for {', '.join(NAMES)}). Install it with 'make browser'.")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: "Browser", serve: Callable[..., Any]) -> Iterator[Callable[..., "Page"]]:
    """Open the page of a service, with the token in its address; any error in it fails the test."""
    contexts, errors = [], list[str]()

    def start(service: Any = None, token: bool = True, **settings: Any) -> "Page":
        service = service or serve()
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" and token else None)
        allowed = (service.address, "blob:")
        page.on("request", lambda request: None if request.url.startswith(allowed) else errors.append(request.url))
        page.goto(f"{service.address}/#token={service.token}" if token else service.address)
        page.get_by_text("1 of 4 classes").wait_for()
        return page

    yield start
    for context in contexts:
        context.close()
    assert errors == []


def files(images: list[bytes], name: str) -> list["FilePayload"]:
    return [{"name": f"{name}-{i}.png", "mimeType": "image/png", "buffer": data} for i, data in enumerate(images)]


TRANSFER = """([texts, name]) => {
    const transfer = new DataTransfer();
    texts.forEach((text, i) => {
        const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
        transfer.items.add(new File([bytes], `${name}-${i}.png`, { type: "image/png" }));
    });
    return transfer;
}"""


def transfer(page: "Page", images: list[bytes], name: str) -> "JSHandle":
    """Return image files as a browser passes them when they are dropped or pasted."""
    return page.evaluate_handle(TRANSFER, [[base64.b64encode(data).decode() for data in images], name])


def drop(page: "Page", selector: str, images: list[bytes]) -> None:
    """Drop image files onto an element."""
    dropped = {"dataTransfer": transfer(page, images, "dropped")}
    page.dispatch_event(selector, "dragover", dropped)
    page.dispatch_event(selector, "drop", dropped)


def test_page_teaches_two_classes_predicts_and_undoes(open_page: Open, serve: Serve, emoji: Emoji) -> None:
    train, test, served = emoji["train"], emoji["test"], serve()
    page = open_page(served, viewport={"width": 1200, "height": 900})
    assert "token" not in page.url  # removed from the address
    drop(page, "#classify-drop", [test["ball"][0], test["boat"][0]])
    page.locator(".result .bars").nth(1).wait_for()
    assert page.locator(".result").count() == 2

    page.locator("#lesson-add").click()
    lessons = page.locator(".lesson")
    for place, name in enumerate(("heart", "moon")):
        lessons.nth(place).get_by_label("Name").fill(name)
        drop(page, f".lesson:nth-child({place + 1}) .drop", train[name][:6])
        assert lessons.nth(place).locator(".thumbs img").count() == 6
    with Store(served.service.folder).locked():  # the lesson lasts until the block ends
        page.get_by_role("button", name="Teach", exact=True).click()
        page.locator("#jobs progress").wait_for()
        drop(page, "#classify-drop", [test["fruit"][0]])  # answered by the old version
        page.locator(".result .bars").nth(2).wait_for()
    page.get_by_text("1 of 6 classes").wait_for(timeout=LEARNING)
    page.locator("#teach-status", has_text="Learned heart, moon").wait_for()
    assert page.locator("#jobs").get_by_text("No likely confusions").or_(page.locator("#jobs .risks")).count() == 1
    page.locator("#versions li:first-child", has_text="3. learned heart, moon").wait_for()
    page.get_by_role("link", name="Diagnostics").click()  # opens it
    page.locator("#prompts svg text").first.wait_for()
    assert page.locator("#prompts svg path").first.evaluate("path => path.style.fill") == "none"
    assert page.locator("#accuracy tbody tr").count() == 3

    page.locator("#classify-files").set_input_files(files(train["heart"][:2], "heart"))
    page.locator(".result", has_text="heart-1.png").locator(".bars").wait_for()
    assert "heart" in page.locator(".result", has_text="heart-0.png").locator(".bars").inner_text()

    page.get_by_role("button", name="Undo learning heart, moon").click()
    page.get_by_text("1 of 4 classes").wait_for(timeout=LEARNING)
    page.locator("#versions li", has_text="rolled back").wait_for()
    assert "current" in page.locator("#versions li").first.inner_text()


def test_page_works_by_keyboard_only(open_page: Open, emoji: Emoji) -> None:
    page = open_page()
    dialogs: list[FileChooser] = []
    page.on("filechooser", lambda dialog: dialogs.append(dialog))
    page.wait_for_timeout(200)  # the handler is registered in the background

    def tab_to(name: str) -> None:
        """Press Tab until the element of that name has the focus, visibly."""
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"({NAME_OF_FOCUS})()").startswith(name):
                assert page.evaluate(FOCUS_IS_VISIBLE), f"the focus on {name} is not visible"
                return
        raise AssertionError(f"{name} cannot be reached with the Tab key")

    def choose(chosen: list["FilePayload"]) -> None:
        """Open the file dialog with the keyboard, and choose."""
        page.keyboard.press("Enter")
        until = time.monotonic() + 20
        while not dialogs and time.monotonic() < until:
            page.wait_for_timeout(20)
        dialogs.pop().set_files(chosen)

    tab_to("Choose images")
    choose(files(emoji["test"]["ball"][:1], "ball"))
    page.locator(".result .bars").wait_for()
    tab_to("Name")
    page.keyboard.type("heart")
    tab_to("Choose images")
    choose(files(emoji["train"]["heart"][:5], "heart"))
    page.locator(".thumbs img").nth(4).wait_for()
    tab_to("Teach")
    page.keyboard.press("Enter")
    page.get_by_text("1 of 5 classes").wait_for(timeout=LEARNING)
    page.get_by_role("button", name="Undo").wait_for()
    page.locator("#teach").focus()
    tab_to("Undo learning heart")
    page.keyboard.press("Enter")
    page.get_by_text("1 of 4 classes").wait_for(timeout=LEARNING)


NAME_OF_FOCUS = """() => {
    const active = document.activeElement;
    return active.getAttribute("aria-label") || active.labels?.[0]?.textContent || active.textContent.trim();
}"""
FOCUS_IS_VISIBLE = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_is_readable(open_page: Open, served: Any, emoji: Emoji, scheme: str) -> None:
    page = open_page(served, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    page.locator("#classify-files").set_input_files(files([emoji["test"]["ball"][0], b"no image"], "x" * 40))
    page.locator(".result .bars").wait_for()
    page.locator(".result .error").wait_for()
    page.locator("#lesson-add").click()
    page.locator(".lesson").first.get_by_label("Name").fill("Ball")
    page.get_by_text("already exists").wait_for()
    page.locator("#diagnostics summary").click()
    page.locator("#prompts svg text").first.wait_for()
    for target in page.locator("button:visible").all():
        box = target.bounding_box()
        assert box and box["height"] >= 24, target.inner_text()
    assert page.evaluate(f"({LOW_CONTRAST})()") == []
    for width in (360, 1200):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


# Text with less than 4.5:1 on its background (WCAG AA), read from what the browser computed.
LOW_CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let place = element; place; place = place.parentElement) {
            const color = parse(getComputedStyle(place).backgroundColor);
            if (color.length === 3 || color[3] > 0.99) return color.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const low = [];
    for (const element of document.querySelectorAll("body *:not(svg *)")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.disabled) continue;
        const [a, b] = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(ground(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return low;
}"""


def test_page_without_token_classifies_but_does_not_teach(open_page: Open, serve: Serve, emoji: Emoji) -> None:
    served = serve()
    page = open_page(served, token=False)
    page.locator("#classify-files").set_input_files(files(emoji["test"]["ball"][:1], "ball"))
    page.locator(".result .bars").wait_for()
    page.get_by_label("Name").fill("heart")
    page.locator(".lesson .file").set_input_files(files(emoji["train"]["heart"][:3], "heart"))
    page.get_by_role("button", name="Teach", exact=True).click()
    page.locator("#teach-error", has_text="token is required").wait_for()
    assert page.locator(".thumbs img").count() == 3  # the input is kept
    page.get_by_label("Token").fill(served.token)
    page.get_by_role("button", name="Use token").click()
    with Store(served.service.folder).locked():  # the lesson waits, so that it can be canceled
        page.get_by_role("button", name="Teach", exact=True).click()
        page.locator("#jobs li", has_text="heart").wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.locator("#jobs li", has_text="canceled").wait_for()


def test_page_accepts_pasted_images_and_flags_unknown_ones(open_page: Open, served: Any, emoji: Emoji) -> None:
    strangers = [image for name in ("building", "hand", "train") for image in emoji["test"][name]]
    flags = [row["unknown"] for row in served.predict(strangers)["predictions"]]
    page = open_page(served)
    pasted = transfer(page, [strangers[flags.index(True)]], "stranger")
    page.evaluate("data => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }))", pasted)
    result = page.locator(".result", has_text="stranger-0.png")
    result.locator(".bars").wait_for()
    assert result.locator(".badge").inner_text() == "Unknown"
