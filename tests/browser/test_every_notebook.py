"""Each notebook in real JupyterLab: it opens, runs, and every control moved by keyboard changes drawing and sentence."""

import nbformat
import pytest

import course
import notebooks

COURSE = sorted(path.relative_to(course.ROOT).as_posix() for path in (course.ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", COURSE)
def test_a_reader_opens_it_runs_it_and_moves_every_control(lab, read, path):
    with lab.open(path) as notebook:
        found = read(notebook)
        assert not found, "\n".join(found)


GOOD = """import ipywidgets as W
from moe_lib.explorers.base import Explorer, says, svg, text
def draw(n=0, **others):
    seen = f"{n} {sorted(others.items())}"
    return svg(text(5, 20, seen), 300, 40, seen) + says(f"Now {seen}.")
grown, toggle = W.IntSlider(value=1, description="grown", disabled=True), W.ToggleButton(False, description="groups")
toggle.observe(lambda change: setattr(grown, "disabled", not change.new), "value")
Explorer(draw, {
    "grown": grown,
    "n": W.IntSlider(value=3, min=0, max=3, description="at its end"),
    "width": W.FloatSlider(value=0.5, min=0, max=1, step=0.1, description="width"),
    "log": W.FloatLogSlider(value=10, description="log"),
    "steps": W.SelectionSlider(options=[8, 16, 64], description="steps"),
    "span": W.IntRangeSlider(value=(2, 4), min=0, max=8, description="span"),
    "kind": W.Dropdown(options=["sigmoid", "softmax"], description="kind"),
    "last": W.Dropdown(options=["a", "b"], value="b", description="last"),
    "norm": W.Checkbox(True, description="normalise"),
    "toggle": toggle,
    "choice": W.ToggleButtons(options=["one", "two"], description="choice"),
    "count": W.BoundedIntText(value=4, min=0, max=9, description="count"),
})"""

# Each cell, and what the reading must say of it.
FAULTY = {
    "Explorer(lambda n: svg('', 9, 9, str(1 / (n - 5))) + says(str(n)), {'n': W.IntSlider(value=4, description='raises')})": (
        "slider 'raises': This drawing failed. ZeroDivisionError"
    ),
    "Explorer(lambda n: svg('', 9, 9, str(n)) + says('always'), {'n': W.IntSlider(value=4, description='mute')})": (
        "slider 'mute': moved by keyboard, and the sentence did not change"
    ),
    "Explorer(lambda n: svg('', 9, 9, 'x') + says('always'), {'n': W.Dropdown(options=[1, 2], description='dead')})": (
        "menu 'dead': moved by keyboard, and the drawing and the sentence did not change"
    ),
    "Explorer(lambda n: svg('', 9, 9, str(n)) + says(str(n)), {'n': W.RadioButtons(options=[1, 2], description='arrows')})": (
        "radio 'arrows': moved by keyboard, and the drawing and the sentence did not change"
    ),
    "Explorer(lambda n: svg('', 9, 9, str(n)) + says(str(n)), {'n': W.IntSlider(value=4, description='shut', disabled=True)})": (
        "slider 'shut': disabled, and no other control enables it"
    ),
    "Explorer(lambda n: svg('', 9, 9, str(n)), {'n': W.IntSlider(value=4, description='wordless')})": "has no sentence",
    "box = W.Checkbox(False, description='careless')\n"
    "box.observe(lambda change: [][1], 'value')\n"
    "Explorer(lambda on: svg('', 9, 9, str(on)) + says(str(on)), {'on': box})": "a callback failed",
    "import sys\nprint('a warning', file=sys.stderr)": "'import sys' wrote to stderr: a warning",
    "from IPython.display import HTML\nHTML('<img src=\"data:image/png;base64,iVBORw0K\">')": "an image has no alternative text",
    "1 / 0": "'1 / 0' raised ZeroDivisionError: division by zero",
}


def saved(lab, name, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=notebooks.METADATA), lab.root / name)
    return name


def test_a_good_explorer_of_every_kind_of_control_passes(lab, read):
    with lab.open(saved(lab, "good.ipynb", GOOD)) as notebook:
        assert read(notebook) == []
        (explorer,) = notebook.explorers()
        controls = explorer.controls()
    assert [c.kind for c in controls] == ["slider"] * 7 + ["menu"] * 2 + ["checkbox", "button", "choice", "number"]
    assert [c.label for c in controls[:6]] == ["grown", "at its end", "width", "log", "steps", "span"]
    assert [c.label for c in controls[7:]] == ["kind", "last", "normalise", "groups", "choice", "count"]


def test_each_fault_is_seen(lab, read):
    """A check of the checks: without it, a harness that sees nothing would pass every notebook."""
    with lab.open(saved(lab, "faulty.ipynb", GOOD, *FAULTY), patience=5) as notebook:
        found = read(notebook)
    for source, words in FAULTY.items():
        assert any(words in fault for fault in found), f"not seen: {words} of {source}\nseen: {found}"
    assert not any("'at its end'" in fault or "'kind'" in fault for fault in found), found


def test_reopening_a_saved_notebook_shows_the_words_that_say_to_run_it(lab, read):
    name = saved(lab, "reopened.ipynb", GOOD)
    notebooks.execute(lab.root / name)
    with lab.open(name) as notebook:
        notebook.page.get_by_text("Run this cell to move them").wait_for()
        assert read(notebook) == []
