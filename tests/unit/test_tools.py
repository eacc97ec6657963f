"""The notebook lint refuses each fault, cleaning takes out what it should and no more, and the commands do what they say."""

import ast
import copy
import os
import subprocess
import sys
from collections import Counter

import nbformat
import pytest

import course
import notebooks

COUNT, LAST = 14, 28  # a good notebook: markdown and code in turn, 14 of each


def good():
    cells = []
    for n in range(1, COUNT + 1):
        cells.append(nbformat.v4.new_markdown_cell(f'Step {n}: <img alt="a step" src="step.svg">', id=f"words-{n}"))
        source = f"x{n} = {n}\nassert x{n} == {n}\nx{n}"
        result = nbformat.v4.new_output("execute_result", {"text/plain": str(n)}, execution_count=n)
        cells.append(nbformat.v4.new_code_cell(source, id=f"code-{n}", execution_count=n, outputs=[result]))
    return nbformat.v4.new_notebook(cells=cells, metadata=copy.deepcopy(notebooks.METADATA))


def output(nb, mime, text):
    nb.cells[3].outputs[0].data = {mime: text}


def stream(name, text):
    return nbformat.v4.new_output("stream", name=name, text=text)


def edit(change):
    nb = good()
    change(nb)
    return nb


# Each change to a good notebook, and the words in which the lint refuses it.
BAD = {
    "not executed": (lambda nb: nb.cells[3].update(execution_count=None), "cell 4 (x2 = 2): has no execution count"),
    "executed out of order": (lambda nb: nb.cells[3].update(execution_count=40), "execution counts are [1, 40, 3"),
    "error": (
        lambda nb: nb.cells[3].outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="no")),
        "ValueError: no",
    ),
    "stderr": (lambda nb: nb.cells[3].outputs.append(stream("stderr", "a warning\nof two lines")), "saved with stderr: a warning"),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), "metadata.widgets"),
    "widget view": (lambda nb: output(nb, notebooks.WIDGET, {"model_id": "5f"}), "model not found"),
    "no kernel": (lambda nb: nb.metadata.pop("kernelspec"), "no kernelspec named python3"),
    "another kernel": (lambda nb: nb.metadata.kernelspec.update(name="venv"), "no kernelspec named python3"),
    "no id": (lambda nb: nb.cells[3].pop("id"), "without an id"),
    "one id twice": (lambda nb: nb.cells[3].update(id="code-1"), "two with the same"),
    "long cell": (lambda nb: nb.cells[3].update(source="x = 1\n" * 26), "cell 4 (x = 1): 26 lines; at most 25"),
    "long cells": (lambda nb: [nb.cells[i].update(source="x = 1\n" * 9) for i in range(1, 2 * 8, 2)], "the median may be 8"),
    "much code": (lambda nb: [nb.cells[i].update(source="x = 1\n" * 25) for i in range(1, 2 * 6, 2)], "lines of code; at most 170"),
    "neighbours": (lambda nb: nb.cells.pop(2), "cell 3 (x2 = 2): follows another code cell"),
    "few cells": (lambda nb: [nb.cells.pop() for _ in range(4)], "24 cells; a notebook has 25 to 40"),
    "many cells": (lambda nb: nb.cells.extend(nbformat.v4.new_markdown_cell("more") for _ in range(13)), "41 cells"),
    "skipped": (lambda nb: nb.cells[3].update(source="# NBVAL_SKIP\nx2 = 2"), "is skipped without a reason"),
    "skipped by a tag": (lambda nb: nb.cells[3].metadata.update(tags=["nbval-skip"]), "is skipped without a reason"),
    "raises, says a tag": (lambda nb: nb.cells[3].metadata.update(tags=["raises-exception"]), "is marked to raise"),
    "raises, says a comment": (lambda nb: nb.cells[3].update(source="# NBVAL_RAISES_EXCEPTION\n1 / 0"), "is marked to raise"),
    "unguarded": (
        lambda nb: [c.update(source="# NBVAL_IGNORE_OUTPUT\n1") for c in nb.cells[1::2]],
        "no assert in the notebook guards",
    ),
    "home": (
        lambda nb: output(nb, "text/plain", "PosixPath('/home/ann/course/data')"),
        "path of one machine: /home/ann/course/data",
    ),
    "home on Windows": (lambda nb: output(nb, "text/html", "saved to C:\\Users\\ann"), "path of one machine: C:\\Users"),
    "path in a stream": (lambda nb: nb.cells[3].outputs.append(stream("stdout", "in /srv/x")), "path of one machine: /srv/x"),
    "bare picture": (lambda nb: output(nb, "image/png", "iVBORw0K"), "a bare image has no alternative text"),
    "html picture": (lambda nb: output(nb, "text/html", '<img src="data:image/png;base64,iVBORw0K">'), "<img> of its output"),
    "empty alt": (lambda nb: nb.cells[2].update(source='<img alt="" src="a.svg">'), "cell 3 (<img alt"),
    "markdown picture": (lambda nb: nb.cells[2].update(source="See ![](a.svg)"), "cell 3 (See ![](a.svg)): an image without"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_lint_refuses(name):
    change, words = BAD[name]
    found = list(notebooks.faults(edit(change)))
    assert any(words in fault for fault in found), found


FINE = {
    "as it is": lambda nb: None,
    "skipped, and why": lambda nb: nb.cells[3].update(source="# NBVAL_SKIP\n# needs eight GPUs\nx2 = 2"),
    "ignored, and guarded": lambda nb: nb.cells[3].update(source="# NBVAL_IGNORE_OUTPUT\nx2 = 2"),
    "slashes that are no path": lambda nb: output(
        nb, "text/html", "<p>tokens/s, and/or 1/2/3</p> <a href='https://a.org/b/c'>c</a>"
    ),
    "svg": lambda nb: output(nb, "image/svg+xml", "<svg><path d='M0 0'/></svg>"),
    "a picture with words": lambda nb: output(nb, "text/html", '<img alt="bars" src="data:image/png;base64,/home/ann/x+">'),
}


@pytest.mark.parametrize("name", FINE)
def test_the_lint_accepts(name):
    assert list(notebooks.faults(edit(FINE[name]))) == []


def test_solutions_may_have_few_cells_but_no_other_fault():
    nb = edit(lambda nb: [nb.cells.pop() for _ in range(10)])
    assert list(notebooks.faults(nb, solution=True)) == []
    nb.cells[1].execution_count = None
    assert len(list(notebooks.faults(nb, solution=True))) == 1


@pytest.mark.parametrize(
    "source, code",
    [
        ("def f(x, scale):\n    return x * x1\nf(1, 2)", "ARG001"),
        ("def f(x):\n    return x * scael\nf", "F821"),
        ("import os", "F401"),
    ],
)
def test_the_lint_looks_at_names_and_arguments(tmp_path, capsys, source, code):
    nb = edit(lambda nb: nb.cells[3].update(source=source))
    path = tmp_path / "01_x.ipynb"
    nbformat.write(nb, path)
    assert notebooks.main(["lint", str(path)]) == 1
    said = capsys.readouterr().out
    assert code in said and "01_x.ipynb: cell 4, line" in said


def test_names_of_earlier_cells_and_stubs_of_exercises_are_fine(tmp_path, capsys):
    stub = "def my_swiglu(x, gate, up, down):\n    raise NotImplementedError\nmy_swiglu, display"
    nb = edit(lambda nb: [nb.cells[3].update(source=stub), nb.cells[5].update(source="x1 + 1")])
    path = tmp_path / "01_x.ipynb"
    nbformat.write(nb, path)
    assert notebooks.main(["lint", str(path)]) == 0, capsys.readouterr().out


# --- cleaning and running --------------------------------------------------------------------------------------------


def test_cleaning_takes_out_what_one_run_or_one_machine_left():
    nb = good()
    nb.metadata.language_info.update(version="3.11.7", codemirror_mode={"name": "ipython", "version": 3})
    nb.metadata.widgets = {"state": {}}
    cell = nb.cells[3]
    cell.metadata = nbformat.from_dict({"execution": {"iopub.execute_input": "noon"}, "scrolled": True, "tags": ["stub"]})
    cell.outputs[0].data[notebooks.WIDGET] = {"model_id": "5f"}
    cell.outputs += [stream("stdout", "a\n"), stream("stdout", "b\n"), stream("stderr", "c\n")]
    notebooks.clean(nb)
    assert nb.metadata == notebooks.METADATA
    assert cell.metadata == {"tags": ["stub"]}
    assert cell.outputs[0].data == {"text/plain": "2"} and cell.execution_count == 2 and cell.id == "code-2"
    assert [o.text for o in cell.outputs[1:]] == ["a\nb\n", "c\n"]


def test_cleaning_leaves_a_clean_notebook_alone():
    assert notebooks.clean(good()) == good()


@pytest.fixture
def written(tmp_path):
    sources = [
        "import os, ipywidgets\nprint('here', flush=True)\nprint(os.path.basename(os.getcwd()))",
        "ipywidgets.IntSlider(3)",
        "# NBVAL_IGNORE_OUTPUT\nimport time\nprint(f'{time.perf_counter_ns()} ns')",
        "1 / 1",
    ]
    cells = [nbformat.v4.new_code_cell(source, id=f"code-{n}") for n, source in enumerate(sources)]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=notebooks.METADATA), path)
    return path


def test_running_twice_gives_the_same_bytes_unless_fresh_outputs_are_asked_for(written):
    assert notebooks.execute(written) == "changed"
    once = written.read_bytes()
    nb = nbformat.read(written, as_version=4)
    assert nb.cells[0].outputs[0].text == f"here\n{written.parent.name}\n"
    assert list(nb.cells[1].outputs[0].data) == ["text/plain"]
    assert [cell.execution_count for cell in nb.cells] == [1, 2, 3, 4]
    assert notebooks.execute(written) == "unchanged" and written.read_bytes() == once
    assert notebooks.execute(written, fresh=True) == "changed"
    again = nbformat.read(written, as_version=4)
    again.cells[2].outputs = nb.cells[2].outputs
    assert again == nb


def test_an_old_output_stays_only_while_source_and_form_are_the_same():
    def timed(source, text):
        cell = nbformat.v4.new_code_cell(source, id="a", execution_count=1, outputs=[stream("stdout", text)])
        return nbformat.v4.new_notebook(cells=[cell])

    def kept(new_source, new_text, old_source="# NBVAL_IGNORE_OUTPUT\ntime()", old_text="took  9.5 ms"):
        return notebooks.keep_the_machines_own(timed(new_source, new_text), timed(old_source, old_text)).cells[0].outputs[0].text

    assert kept("# NBVAL_IGNORE_OUTPUT\ntime()", "took 10.25 ms") == "took  9.5 ms"
    assert kept("# NBVAL_IGNORE_OUTPUT\ntime()", "10 ms") == "10 ms"
    assert kept("# NBVAL_IGNORE_OUTPUT\ntime(2)", "took 10.25 ms") == "took 10.25 ms"
    assert kept("time()", "took 10.25 ms", old_source="time()") == "took 10.25 ms"


def test_a_notebook_that_fails_is_not_written_and_the_cell_is_shown(written, capsys):
    nb = nbformat.read(written, as_version=4)
    nb.cells[3].source = "1 / 0"
    nbformat.write(nb, written)
    before = written.read_bytes()
    assert notebooks.main(["run", str(written)]) == 1
    assert written.read_bytes() == before
    assert "ZeroDivisionError" in (said := capsys.readouterr().out) and "not written" in said


# --- the commands ----------------------------------------------------------------------------------------------------


def test_an_old_python_can_read_the_file_that_refuses_it():
    ast.parse((course.ROOT / "tools" / "course.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_an_old_python_is_refused_with_what_to_type():
    oldest = course.oldest_python()
    course.refuse_old_python((*oldest, 0), "python3")
    with pytest.raises(SystemExit, match=r"python3 is Python 3\.9\.6; the course needs 3\.11 or newer\.\n.*PYTHON=python3\.13"):
        course.refuse_old_python((3, 9, 6), "python3", which=lambda name: name in ("python3.12", "python3.13"))
    with pytest.raises(SystemExit, match="install one"):
        course.refuse_old_python((3, 9, 6), "python3", which=lambda _: None)


def test_a_failing_install_is_tried_again_and_not_for_ever():
    statuses, slept = [1, 2, 0], []
    assert course.retrying(lambda: statuses.pop(0), sleep=slept.append) == 0
    assert statuses == [] and len(slept) == 2
    assert course.retrying(lambda: 7, times=2, sleep=slept.append) == 7
    assert len(slept) == 3


def test_a_second_install_does_nothing_and_a_changed_one_does_not(tmp_path, monkeypatch):
    python = tmp_path / "python"
    monkeypatch.setattr(course, "VENV", tmp_path)
    monkeypatch.setattr(course, "PYTHON", python)
    calls = []
    monkeypatch.setattr(course.subprocess, "call", lambda command, **_: calls.append(command) or 0)
    course.install("test")
    assert [command[1:3] for command in calls] == [["-m", "venv"], ["-m", "pip"], [course.__file__, "check"]]
    assert calls[1][-4:] == ["-c", "constraints.txt", "-e", ".[test]"]
    python.touch()
    course.install("test")
    course.install("lab")  # test holds all of lab
    assert len(calls) == 3
    monkeypatch.setattr(course, "fingerprint", lambda: "another constraints.txt")
    course.install("lab")
    assert len(calls) == 6


def test_an_install_that_fails_says_so_and_is_not_taken_for_done(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "VENV", tmp_path)
    monkeypatch.setattr(course, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(course.subprocess, "call", lambda command, **_: int("check" in command))
    with pytest.raises(SystemExit, match="not complete"):
        course.install("lab")
    assert not (tmp_path / ".lab").exists()


def test_this_environment_passes_the_check():
    done = subprocess.run([sys.executable, course.__file__, "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_environment_that_lacks_a_package_is_told_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    (wrong,) = course.check()
    assert wrong.startswith("ipywidgets cannot be imported: ")


def test_the_summary_names_whatever_did_not_run_and_why(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.skip(reason='needs a GPU')\ndef test_skipped(): pass\n"
        "@pytest.mark.skip(reason='needs a GPU')\ndef test_skipped_too(): pass\n"
        "@pytest.mark.xfail(reason='not yet')\ndef test_expected(): assert False\n"
        "def test_bare(): pytest.skip()\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_error(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--rootdir", tmp_path, tmp_path], capture_output=True
    )
    passed, failed, reasons = course.read_report(report)
    assert (passed, failed) == (1, 2)
    assert reasons.pop("needs a GPU") == 2 and reasons.pop("not yet") == 1
    assert len(reasons) == 1 and "test_bare" in next(iter(reasons))
    said = course.table([("tests", 5, 0, 3.4, Counter({"needs a GPU": 2})), ("browser", 0, 0, 0, Counter([course.NO_CHROMIUM]))])
    assert "2 × needs a GPU" in said and "1 × no Chromium" in said
    assert course.table([("tests", 5, 0, 3.4, Counter())]).endswith("Everything ran.")


def test_a_part_that_hangs_is_stopped_and_named(tmp_path, monkeypatch):
    (tmp_path / "test_hang.py").write_text("import time\ndef test_hang(): time.sleep(600)\n")
    monkeypatch.setattr(course, "PYTHON", sys.executable)
    monkeypatch.setattr(course, "REPORTS", tmp_path)
    status, reason = course.run_part("hang", [str(tmp_path), f"--rootdir={tmp_path}"], None, seconds=4)
    assert status == 1 and "MOE_TEST_MINUTES" in reason


def test_every_folder_of_tests_is_part_of_make_test():
    everything = {path.parent for path in (course.ROOT / "tests").rglob("test_*.py")} - {course.ROOT / "tests"}
    apart = {course.ROOT / "tests" / name for name in ("browser", "faults")}
    parts = course.parts(cores=2)
    assert parts["tests"][0] == "tests" and {course.ROOT / parts[p][0] for p in ("browser", "faults")} == apart
    ignored = {course.ROOT / option.split("=")[1] for option in parts["tests"] if option.startswith("--ignore")}
    assert ignored == apart and everything - apart
    assert "-n" not in course.parts(cores=1)["tests"]


@pytest.mark.skipif(os.name == "nt", reason="the stub is a shell script")
def test_a_chosen_chromium_comes_first_and_a_stub_is_not_taken_for_one(tmp_path, monkeypatch):
    stub = tmp_path / "chromium"
    stub.write_text("#!/bin/sh\necho 'install me with snap' >&2\nexit 10\n")
    stub.chmod(0o755)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(course.shutil, "which", lambda name: str(stub) if name == "chromium" else None)
    assert course.find_chromium(sys.executable) != str(stub)
    stub.write_text("#!/bin/sh\necho Chromium 150\n")
    assert course.find_chromium(sys.executable) == str(stub)
    monkeypatch.setenv("CHROMIUM", "/somewhere/else")
    assert course.find_chromium(sys.executable) == "/somewhere/else"


@pytest.fixture
def bare(monkeypatch):
    """A machine without Chromium: records what is called; `works` are the words of the command that brings one."""
    calls, works, release = [], [], ["ID=debian"]

    def call(command, **_):
        calls.append(" ".join(command))
        return 0

    monkeypatch.setattr(course.subprocess, "call", call)
    monkeypatch.setattr(course.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(course.time, "sleep", lambda _: None)
    monkeypatch.setattr(course, "_read", lambda _: release[0])
    monkeypatch.setattr(course, "find_chromium", lambda: "/found" if works and any(works[0] in c for c in calls) else None)
    return calls, works, release


def test_chromium_comes_through_apt_on_debian(bare):
    calls, works, _ = bare
    works.append("install -y --no-install-recommends chromium")
    assert course.install_chromium() == "/found"
    assert any("apt-get" in call and call.endswith("update") for call in calls)
    assert not any("playwright" in call for call in calls)


@pytest.mark.parametrize("system", ["ID=debian", "ID=ubuntu", ""])
def test_chromium_comes_through_playwright_where_apt_brings_none(bare, system):
    calls, works, release = bare
    works.append("playwright install chromium")
    release[0] = system
    assert course.install_chromium() == "/found"
    assert any(" install -y" in call for call in calls) == (system == "ID=debian")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("ci", [True, False])
def test_without_chromium_the_browser_tests_are_named_as_not_run_and_ci_fails(monkeypatch, capsys, ci):
    monkeypatch.setattr(course, "install", lambda _: None)
    monkeypatch.setattr(course, "environment", dict)
    monkeypatch.setattr(course.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    assert course.test(["browser"]) == int(ci)
    said = capsys.readouterr().out
    assert "Did not run, and why:" in said and "no Chromium" in said and "CHROMIUM=/path/to/it" in said


def test_a_failing_part_fails_the_whole_and_the_others_still_run(monkeypatch, capsys):
    ran = []

    def run_part(name, *_):
        ran.append(name)
        return (1, None) if name == "tests" else (0, None)

    monkeypatch.setattr(course, "install", lambda _: None)
    monkeypatch.setattr(course, "install_chromium", lambda: "/found")
    monkeypatch.setattr(course, "environment", dict)
    monkeypatch.setattr(course, "run_part", run_part)
    monkeypatch.setattr(course.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(course, "read_report", lambda path: (3, int(path.stem == "tests"), Counter()))
    assert course.test([]) == 1
    assert [name for name in ran if name != "faults"] == ["tests", "notebooks", "browser"]
    assert course.test(["notebooks"]) == 0
    assert "Everything ran." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no part 'unit'; the parts are: tests faults notebooks browser"):
        course.test(["unit"])
