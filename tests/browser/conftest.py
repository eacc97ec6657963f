"""JupyterLab in Chromium as a reader has it: open a notebook, run it, move its controls by keyboard, see what changed.

def test_x(lab):
    with lab.open("notebooks/02_gating.ipynb") as notebook:
        notebook.run()
        explorer = notebook.explorers()[0]
        before = explorer.look()                # .drawing (HTML) and .words (the sentence)
        control = explorer.controls()[0]        # .kind, .label
        after = explorer.move(control)          # None when nothing changed in both
        assert not notebook.faults()            # errors, stderr, callbacks that raised, pictures without words …
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError as Late
from playwright.sync_api import sync_playwright

import course

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".ipynb_checkpoints", ".*_cache", ".hypothesis")
SECONDS_TO_START, SECONDS_TO_RUN = 180, 600  # generous: a busy machine is not a fault
SECONDS_TO_REACT, SECONDS_BETWEEN_KEYS = 30, 3

# Keeps what the kernel says outside any cell: an exception in a widget's callback goes there, and a reader never sees it.
LISTEN = """() => {
    window.said = [];
    const panel = window.jupyterapp.shell.currentWidget;
    panel.sessionContext.iopubMessage.connect((_, message) => {
        if (message.parent_header.msg_type === 'execute_request') return;  // this one is in a cell's output
        const {ename, evalue, name, text} = message.content;
        const said = message.header.msg_type === 'error' ? `${ename}: ${evalue}` : name === 'stderr' ? text : '';
        // JupyterLab asks a new kernel for widgets of an earlier session, before ipywidgets is imported
        if (said && !/^No such comm/.test(said)) window.said.push(said);
    });
}"""
READY = """async () => {
    await window.jupyterapp.restored;
    const panel = window.jupyterapp.shell.currentWidget;
    await panel.context.ready; await panel.sessionContext.ready; await panel.revealed;
    window.jupyterapp.shell.collapseLeft();
}"""
OUTPUTS = (
    "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells.map(c => [c.source, c.outputs || []])"
)
WIDGETS = ".jp-Notebook .jp-OutputArea-output:has(> .jupyter-widgets)"
SHOWN = f"""() => {{
    const outputs = window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells.flatMap(c => c.outputs || []);
    const wanted = outputs.filter(o => o.data && 'application/vnd.jupyter.widget-view+json' in o.data).length;
    return document.querySelectorAll('{WIDGETS}').length === wanted;
}}"""
CONTROLS = """e => [...e.querySelectorAll(
        '.noUi-handle, select, input:not([type=radio]), textarea, button, .widget-toggle-buttons, .widget-radio-box')]
    .filter(c => c.offsetParent && !c.parentElement.closest('.widget-toggle-buttons'))
    .map((c, i) => {
        c.dataset.control = i;
        const widget = c.closest('.widget-inline-hbox, .widget-toggle-buttons, .widget-checkbox, .widget-radio');
        const kind = c.matches('.noUi-handle') ? 'slider' : c.matches('select') ? 'menu' : c.matches('button') ? 'button'
            : c.matches('.widget-toggle-buttons') ? 'choice' : c.matches('.widget-radio-box') ? 'radio'
            : c.type === 'checkbox' ? 'checkbox' : c.type === 'number' ? 'number' : 'text';
        const labels = [...(widget?.querySelectorAll('.widget-label, .widget-label-basic') || []), c];
        const label = labels.map(l => l.textContent.replace(/\\u200b/g, '').trim()).find(l => l) || '';
        return {index: i, kind, label, enabled: !c.closest('[disabled]') && !c.querySelector('[disabled]')};
    })"""
LOOK = """e => {
    const words = [...e.querySelectorAll('.moe-says')].map(s => s.textContent.trim()).join(' ');
    const drawing = [...e.querySelectorAll('.widget-html-content, .widget-html')].map(h => {
        const copy = h.cloneNode(true);
        copy.querySelectorAll('.moe-says').forEach(s => s.remove());
        return copy.innerHTML;
    }).join('');
    return {drawing, words, error: e.querySelector('.moe-error')?.textContent.trim() || ''};
}"""


@dataclass(frozen=True)
class Look:
    """What an explorer shows: its drawing as HTML without the sentence, the sentence, and the alert of a draw that failed."""

    drawing: str
    words: str
    error: str


@dataclass(frozen=True)
class Control:
    index: int
    kind: str
    label: str
    enabled: bool

    def __str__(self):
        return f"{self.kind} {self.label!r}"


class Explorer:
    """One cell's widget output."""

    def __init__(self, notebook, root):
        self.notebook, self.root = notebook, root

    def look(self):
        return Look(**self.root.evaluate(LOOK))

    def controls(self):
        return [Control(**control) for control in self.root.evaluate(CONTROLS)]

    def move(self, control, keys=None):
        """Move a control by keyboard until both drawing and sentence differ from now, and return that look; None if they never do.

        Tries one key after the other, a few steps first and then the ends, since one step need not show.
        """
        before, page = self.look(), self.notebook.page
        place = self.root.locator(f'[data-control="{control.index}"]')
        place.scroll_into_view_if_needed()
        keys = keys or self._keys(control, place)
        for n, key in enumerate(keys):
            (place.locator("button:not(.mod-active)").first if control.kind == "choice" else place).focus()
            if control.kind == "radio":
                place.locator("input:checked").focus()
            page.keyboard.press(key)
            patience = self.notebook.patience
            end = time.monotonic() + (patience if n == len(keys) - 1 else min(patience, SECONDS_BETWEEN_KEYS))
            while time.monotonic() < end:
                now = self.look()
                if now.error or (now.drawing != before.drawing and now.words != before.words):
                    return now
                page.wait_for_timeout(30)
        return None

    def _keys(self, control, place):
        if control.kind == "slider":
            at_end = place.evaluate("e => Number(e.ariaValueNow) >= Number(e.ariaValueMax)")
            return ["ArrowLeft"] * 3 + ["Home"] if at_end else ["ArrowRight"] * 3 + ["End", "Home"]
        # In a menu or between radio buttons JupyterLab takes the arrows for itself and moves to another cell.
        others = {
            "menu": ["End", "Home", "Space", "ArrowDown", "Enter"],
            "number": ["ArrowUp", "ArrowDown", "ArrowDown"],
            "radio": ["ArrowDown", "ArrowUp"],
            "text": ["1", "Enter"],
        }
        return others.get(control.kind, ["Space"])


class Notebook:
    """A notebook open in JupyterLab. `patience`: how many seconds a control has to show that it did something."""

    def __init__(self, page, patience):
        self.page, self.patience = page, patience

    def run(self):
        """Run all cells, and wait until the last is done and every widget is shown."""
        done = self.page.evaluate(
            """seconds => Promise.race([
                window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => true),
                new Promise(resolve => setTimeout(() => resolve(false), seconds * 1000)),
            ])""",
            SECONDS_TO_RUN,
        )
        assert done, f"not done after {SECONDS_TO_RUN} s: a dialog, or a cell that runs on"
        try:
            self.page.wait_for_function(SHOWN, timeout=1000 * SECONDS_TO_REACT)
        except Late:
            raise AssertionError(f"a widget is not shown {SECONDS_TO_REACT} s after its cell ran") from None

    def explorers(self):
        outputs = self.page.locator(WIDGETS)
        return [Explorer(self, outputs.nth(i)) for i in range(outputs.count())]

    def faults(self):
        """What is wrong with the page as it stands, a line for each."""
        found = []
        for source, outputs in self.page.evaluate(OUTPUTS):
            first = source.splitlines()[0] if source else "empty cell"
            for output in outputs:
                if output["output_type"] == "error":
                    found.append(f"{first!r} raised {output['ename']}: {output['evalue']}")
                if output.get("name") == "stderr":
                    found.append(f"{first!r} wrote to stderr: {''.join(output['text']).strip()}")
        found += [f"a callback failed: {said.strip()}" for said in self.page.evaluate("() => window.said")]
        found += [f"an alert is shown: {text.strip()}" for text in self.page.locator(".moe-error").all_text_contents()]
        # JupyterLab itself writes "Image" where there is no word
        bare = (
            "() => [...document.querySelectorAll('.jp-Notebook img')].filter(e => /^(image)?$/i.test(e.alt.trim())).map(e => e.src)"
        )
        found += [f"an image has no alternative text: {src[:60]}" for src in self.page.evaluate(bare)]
        bare = ".jp-OutputArea-output svg[role=img]:not([aria-label]), .jp-OutputArea-output svg[role=img][aria-label='']"
        found += ["a drawing has no aria-label"] * self.page.locator(bare).count()
        broken = (
            self.page.locator(".jp-Notebook").get_by_text("model not found").or_(self.page.get_by_text("Error displaying widget"))
        )
        found += ["a widget cannot be shown (model not found)"] * broken.count()
        return found


def faults_of_a_reading(notebook):
    """Open, look, run, move every control of every explorer by keyboard; the faults met on the way, a line for each."""
    found = [f"before running: {fault}" for fault in notebook.faults() if "model not found" in fault]
    notebook.run()
    found += notebook.faults()
    for number, explorer in enumerate(notebook.explorers(), 1):
        controls = explorer.controls()
        if controls and not explorer.look().words:
            found.append(f"explorer {number} has no sentence (class moe-says) beside its drawing")
            continue
        moved = set()
        # The last first: what a control enables or disables commonly comes after it. Asked anew each time, because it may have.
        while todo := [c for c in explorer.controls() if c.enabled and c.index not in moved]:
            control = todo[-1]
            moved.add(control.index)
            before, after = explorer.look(), explorer.move(control)
            now = after or explorer.look()
            if now.error:
                found.append(f"explorer {number}, {control}: {now.error}")
            elif after is None:
                still = [
                    n for n, same in (("drawing", now.drawing == before.drawing), ("sentence", now.words == before.words)) if same
                ]
                found.append(f"explorer {number}, {control}: moved by keyboard, and the {' and the '.join(still)} did not change")
        found += [f"explorer {number}, {c}: disabled, and no other control enables it" for c in controls if c.index not in moved]
    return list(dict.fromkeys(found + notebook.faults()))


class Lab:
    """A JupyterLab server on a copy of the checkout, and a browser."""

    def __init__(self, root, url, token, browser):
        self.root, self.url, self.token, self.browser = root, url, token, browser

    @contextmanager
    def open(self, path, patience=SECONDS_TO_REACT):
        """Open a notebook (a path below the checkout) as it was saved; closing it ends its kernel."""
        page = self.browser.new_page(viewport={"width": 1280, "height": 1400})
        page.set_default_timeout(1000 * SECONDS_TO_START)
        name = str(path).replace("/", "-").removesuffix(".ipynb")
        try:
            page.goto(f"{self.url}/lab/tree/{path}?reset&token={self.token}")
            page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext")
            page.evaluate(READY)
            page.evaluate(LISTEN)
            yield Notebook(page, patience)
        except BaseException:
            course.REPORTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(course.REPORTS / f"{name}.png"))
            raise
        finally:
            page.close()
            for kernel in json.load(self._ask("kernels")):
                self._ask(f"kernels/{kernel['id']}", method="DELETE")

    def _ask(self, what, method="GET"):
        request = urllib.request.Request(f"{self.url}/api/{what}", method=method, headers={"Authorization": f"token {self.token}"})
        return urllib.request.urlopen(request, timeout=60)


@contextmanager
def server(root, home):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    settings, token = home / "settings" / "@jupyterlab", secrets.token_hex(16)
    for plugin, values in {
        "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is on the page, seen or not
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    options = {
        "IdentityProvider.token": token,
        "ServerApp.root_dir": root,
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.allow_root": True,
        "LabApp.expose_app_in_browser": True,
        "LabApp.user_settings_dir": home / "settings",
        "LabApp.workspaces_dir": home / "workspaces",
    }
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", *(f"--{name}={value}" for name, value in options.items())]
    with open(home / "jupyterlab.log", "w") as log:
        alone = {"start_new_session": True} if os.name != "nt" else {}
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}, **alone)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS_TO_START
        while True:
            try:
                urllib.request.urlopen(f"{url}/api", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"JupyterLab did not start:\n{Path(log.name).read_text()[-3000:]}") from None
                time.sleep(0.2)
        yield url, token
    finally:
        if os.name == "nt":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    chromium = course.find_chromium(sys.executable)
    if not chromium:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(course.NO_CHROMIUM)
    home = tmp_path_factory.mktemp("lab")
    root = shutil.copytree(course.ROOT, home / "course", ignore=LEFT_OUT)
    with server(root, home) as (url, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Lab(root, url, token, browser)
        browser.close()


@pytest.fixture(scope="session")
def read():
    """The generic reading, for tests."""
    return faults_of_a_reading
