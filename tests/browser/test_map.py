"""The map and the cards as a reader has them: by keyboard, lit, readable in both themes, without a kernel, and as a web page."""

import pytest
from nbconvert import HTMLExporter

import course
from moe_lib.evidence import nodes

PAGE = "notebooks/00_the_block_on_one_page.ipynb"
TITLES = [node.title for node in nodes().values()]
OPEN = """() => [...document.querySelectorAll('.moe-map details[open]')].map(d => {
    const card = d.querySelector('.moe-card'), box = card.getBoundingClientRect();
    const map = d.closest('.moe-map').querySelector('img').getBoundingClientRect();
    return [d.querySelector('summary').textContent, card.ariaLabel, box.height > 100 && box.top >= map.bottom - 2];
})"""
# Which symbols of a card have the ground of a lit one, by where they stand.
LIT = """card => {
    const places = {equation: '.moe-equation', code: '.moe-code', shapes: '.moe-shapes'};
    return Object.fromEntries(Object.entries(places).map(([name, place]) => [name,
        [...card.querySelectorAll(place + ' [class^=moe-]:is([class*=moe-s-], [class*=moe-t-])')]
            .filter(e => getComputedStyle(e).backgroundColor === 'rgb(255, 216, 102)').map(e => e.textContent)]));
}"""
# The worst contrast between any text of a card and the first painted ground behind it, and that text.
CONTRAST = """card => {
    const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    let worst = [99, ''];
    const walk = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        if (!walk.currentNode.data.trim()) continue;
        let ground = walk.currentNode.parentElement;
        const ink = light(numbers(getComputedStyle(ground).color));
        while ((numbers(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
        const paper = light(numbers(getComputedStyle(ground).backgroundColor));
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        if (ratio < worst[0]) worst = [ratio, walk.currentNode.data];
    }
    return worst;
}"""


def tab_to(page, title):
    """Press Tab until the part of the map with this title has the focus."""
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.moe-map summary') && document.activeElement.textContent") == title:
            return
    raise AssertionError(f"Tab does not reach {title}")


def open_all_by_keyboard(page):
    """Enter on every part in turn, reached by Tab alone, opens its own card below the map, and closes the one before."""
    page.locator(".moe-map summary").first.focus()
    if page.evaluate(OPEN) == [[TITLES[0], TITLES[0], True]]:  # as it is from the start
        page.keyboard.press("Enter")
        assert page.evaluate(OPEN) == []
    page.keyboard.press("Enter")
    assert page.evaluate(OPEN) == [[TITLES[0], TITLES[0], True]]
    for title in TITLES[1:]:
        tab_to(page, title)
        page.keyboard.press("Enter")
        assert page.evaluate(OPEN) == [[title, title, True]]


def light_up_one_symbol(page, card):
    """On the card of the product, u by keyboard and a by pointer, each in equation, code and shapes and nothing else."""
    nothing = {"equation": [], "code": [], "shapes": []}
    assert card.evaluate(LIT) == nothing
    card.locator(".moe-shapes [tabindex]").nth(1).focus()
    lit = card.evaluate(LIT)
    assert (lit["equation"], lit["code"], lit["shapes"]) == (["u"], ["up"], ["u […, 2048 inter]"])
    page.evaluate("() => document.activeElement.blur()")
    assert card.evaluate(LIT) == nothing
    card.locator(".moe-equation [class=moe-s-0]").hover()
    lit = card.evaluate(LIT)
    assert (lit["equation"], lit["code"], lit["shapes"]) == (["a"], ["F.silu(gate)"], ["a […, 2048 inter]"])
    page.mouse.move(0, 0)


@pytest.fixture(scope="module")
def opened(lab):
    with lab.open(PAGE) as notebook:
        notebook.run()
        yield notebook


def test_every_part_opens_its_card_by_keyboard(opened):
    assert opened.page.evaluate(OPEN) == [[TITLES[0], TITLES[0], True]]
    open_all_by_keyboard(opened.page)


def test_a_symbol_lights_up_everywhere_on_its_card_alone(opened):
    page = opened.page
    card = page.locator(".jp-OutputArea-output > .moe-card[aria-label='Element-wise product']").last
    others = [other for other in page.locator(".moe-card").all() if other.is_visible()]
    card.scroll_into_view_if_needed()
    light_up_one_symbol(page, card)
    card.locator(".moe-shapes [tabindex]").nth(1).focus()
    assert sum(any(other.evaluate(LIT).values()) for other in others) == 1


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_text_of_every_card_stands_out(opened, theme):
    page = opened.page
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{str('Light' in theme).lower()}'")
    for title in TITLES:
        summary = page.locator(".moe-map summary", has_text=title).first
        card = page.locator(f'.moe-map .moe-card[aria-label="{title}"]')
        if not card.is_visible():
            summary.focus()
            page.keyboard.press("Enter")
        ratio, words = card.evaluate(CONTRAST)
        assert ratio >= 4.5, (title, words)
    card.locator(".moe-shapes [tabindex]").first.focus()
    ratio, words = card.evaluate(CONTRAST)
    assert ratio >= 4.5, f"{words}, lit"


def test_it_works_without_a_kernel(opened):
    opened.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    open_all_by_keyboard(opened.page)


def test_before_anything_runs_the_words_are_there(lab):
    """A notebook that nobody has run here is not trusted: JupyterLab drops its style sheets. What is left reads in order."""
    with lab.open(PAGE) as notebook:
        page = notebook.page
        assert page.locator("summary", has_text="Element-wise product").count() == 1
        assert page.get_by_text("The activated gate scales the up features").count() == 2  # in the map, and as a card
        assert not [fault for fault in notebook.faults() if "alternative text" in fault]


def test_as_a_web_page(lab, tmp_path):
    html, _ = HTMLExporter().from_filename(str(course.ROOT / PAGE))
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    page = lab.browser.new_page(viewport={"width": 1280, "height": 1400})
    try:
        page.goto((tmp_path / "page.html").as_uri(), wait_until="domcontentloaded")  # it also asks a CDN for MathJax
        open_all_by_keyboard(page)
        light_up_one_symbol(page, page.locator(".jp-OutputArea-output > .moe-card[aria-label='Element-wise product']").last)
    finally:
        page.close()
