"""Keep the notebooks as they are committed: executed, clean and short.

    python tools/notebooks.py run [--fresh] [--jobs N] [path…]     execute and clean in place
    python tools/notebooks.py lint [path…]                         say what is wrong, file by file and cell by cell

Without a path: every notebook of notebooks/, solutions included. `run` twice gives the same bytes. Where a cell is marked
`# NBVAL_IGNORE_OUTPUT`, the machine itself is the answer; its old output stays when the new one differs only in its numbers and
pixels, unless --fresh asks for this machine's.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

import course

FOLDER = course.ROOT / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},  # not its version, which differs from machine to machine
}
CELLS, CELL_LINES, MEDIAN_LINES, ALL_LINES = range(25, 41), 25, 8, 170


# --- executing and cleaning ------------------------------------------------------------------------------------------


def clean(nb):
    """Take out what differs from run to run or serves one machine only. Outputs, execution counts and cell ids stay."""
    nb.metadata = nbformat.from_dict(METADATA)
    for cell in nb.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in ("jupyter", "tags") if key in cell.metadata})
        if cell.cell_type == "code":
            cell.outputs = _clean_outputs(cell.outputs)
    return nb


def _clean_outputs(outputs):
    clean = []
    for output in outputs:
        if output.output_type == "stream" and clean and clean[-1].get("name") == output.name:
            clean[-1].text += output.text  # whether a stream comes in one piece or in two is chance
            continue
        if "data" in output:
            # A saved view points at a model that is gone with its kernel, and JupyterLab would show "model not found" in its
            # place. Without it a reader sees the widget's text, which says to run the cell.
            output.data.pop(WIDGET, None)
        output.pop("transient", None)
        clean.append(output)
    return clean


def keep_the_machines_own(nb, old):
    """Put back the old outputs of ignored cells, where source and form are the same and only numbers and pixels differ."""
    before = {cell.get("id"): cell for cell in old.cells if cell.cell_type == "code"}
    for cell in nb.cells:
        was = before.get(cell.get("id"))
        if was and "NBVAL_IGNORE_OUTPUT" in _marks(cell) and was.source == cell.source and _form(was) == _form(cell):
            cell.outputs = was.outputs
    return nb


def _form(cell):
    words = json.dumps([{k: v for k, v in o.items() if k != "execution_count"} for o in cell.outputs], sort_keys=True)
    words = re.sub(r"base64,[A-Za-z0-9+/=]+", "pixels", words)
    return re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?|\s+", "#", words)


def execute(path, fresh=False):
    """Run a notebook in its own folder and a new kernel, clean it, and write it if anything changed. Returns what happened."""
    text = path.read_text(encoding="utf-8")
    nb, old = nbformat.reads(text, as_version=4), clean(nbformat.reads(text, as_version=4))
    options = {"timeout": 600, "kernel_name": "python3", "extra_arguments": ["--log-level=ERROR"]}
    NotebookClient(nb, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
    clean(nb)
    if not fresh:
        keep_the_machines_own(nb, old)
    new = nbformat.writes(nb) + "\n"
    if new == text:
        return "unchanged"
    path.write_text(new, encoding="utf-8", newline="\n")
    return "changed"


def run(paths, fresh, jobs):
    os.environ.update(course.environment())
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for path, future in [(path, pool.submit(execute, path, fresh)) for path in paths]:
            try:
                print(f"{_shown(path)}: {future.result()}", flush=True)
            except Exception as error:
                failed = True
                print(f"{_shown(path)}: not written; {error}", flush=True)
    return failed


# --- the lint --------------------------------------------------------------------------------------------------------


def faults(nb, solution=False):
    """What is wrong with a notebook, a line for each fault. (Names and arguments are looked at by `code_faults`.)"""
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    yield from _whole_faults(nb, code, solution)
    for number, cell in enumerate(nb.cells, 1):
        here = f"cell {number} ({_first_line(cell)})"
        check = _code_cell_faults if cell.cell_type == "code" else _markdown_cell_faults
        yield from (f"{here}: {fault}" for fault in check(cell))
        if number > 1 and cell.cell_type == nb.cells[number - 2].cell_type == "code":
            yield f"{here}: follows another code cell; put a sentence between them"


def _whole_faults(nb, code, solution):
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "no kernelspec named python3 in the metadata; JupyterLab would ask the reader for a kernel"
    if "widgets" in nb.metadata:
        yield "metadata.widgets is saved, and web viewers refuse it; run make notebooks"
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "cells without an id, or two with the same; run make notebooks"
    counts = [cell.execution_count for cell in code]
    if None not in counts and counts != list(range(1, len(code) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(code)} in order; restart the kernel and run all"
    lines = [_lines(cell) for cell in code]
    if lines and statistics.median(lines) > MEDIAN_LINES:
        yield f"half of the code cells have more than {statistics.median(lines):g} lines; the median may be {MEDIAN_LINES}"
    if sum(lines) > ALL_LINES:
        yield f"{sum(lines)} lines of code; at most {ALL_LINES}: move some into moe_lib"
    if not solution and len(nb.cells) not in CELLS:
        yield f"{len(nb.cells)} cells; a notebook has {CELLS.start} to {CELLS.stop - 1}"
    if any("NBVAL_IGNORE_OUTPUT" in _marks(cell) for cell in code) and not any(
        re.search(r"^\s*assert\b", c.source, re.M) for c in code
    ):
        yield "an output is ignored (NBVAL_IGNORE_OUTPUT), and no assert in the notebook guards what it claims"


def _code_cell_faults(cell):
    if cell.execution_count is None:
        yield "has no execution count, so its output is compared with nothing; run make notebooks"
    if _lines(cell) > CELL_LINES:
        yield f"{_lines(cell)} lines; at most {CELL_LINES}"
    marks = _marks(cell)
    if "NBVAL_SKIP" in marks and not re.search(r"^#\s*NBVAL_SKIP\s*\n#\s*\w+|^#\s*\w+.*\n#\s*NBVAL_SKIP\s*$", cell.source, re.M):
        yield "is skipped without a reason; say why in a comment beside # NBVAL_SKIP"
    if marks & {"NBVAL_RAISES_EXCEPTION", "RAISES_EXCEPTION"}:
        yield "is marked to raise; catch the exception in the cell and show its message"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"saved with an error: {output.ename}: {output.evalue}"
        if output.get("name") == "stderr":
            yield f"saved with stderr: {output.text.strip().splitlines()[0] if output.text.strip() else ''}"
        data = output.get("data", {})
        if WIDGET in data:
            yield "a widget's view is saved, and would open as 'model not found'; run make notebooks"
        if "text/html" not in data and any(mime.startswith("image/") and mime != "image/svg+xml" for mime in data):
            yield "a bare image has no alternative text; show it as moe_lib.figures does"
        words = re.sub(r"base64,[A-Za-z0-9+/=]+", "", "\n".join([output.get("text", ""), *map(str, data.values())]))
        if found := re.search(r"(?<![\w.~:/<)\]])(/[\w.+-]+){2,}|(?<![A-Za-z])[A-Za-z]:\\\w+", words):
            yield f"its output holds a path of one machine: {found.group()}"
        if _images_without_alt(words):
            yield "an <img> of its output has no alternative text"


def _markdown_cell_faults(cell):
    if cell.cell_type == "markdown" and (re.search(r"!\[\s*\]", cell.source) or _images_without_alt(cell.source)):
        yield "an image without alternative text"


def _images_without_alt(html):
    return any(not re.search(r"\balt\s*=\s*(\"\s*[^\"\s]|'\s*[^'\s]|[^\s\"'>])", tag) for tag in re.findall(r"<img\b[^>]*>", html))


def _marks(cell):
    """nbval's markers of a cell, from its comments and its tags alike."""
    comments = re.findall(r"^\s*#+\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$", cell.source, re.M)
    marks = {*comments, *(tag.upper().replace("-", "_") for tag in cell.metadata.get("tags", []))}
    return {mark.replace("PYTEST_VALIDATE", "NBVAL") for mark in marks}


def _lines(cell):
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def _first_line(cell):
    line = next((line for line in cell.source.splitlines() if line.strip()), "empty")
    return line if len(line) <= 40 else line[:39] + "…"


def code_faults(paths):
    """Undefined and unused names, and arguments that a function ignores: it would pass here by a global's grace only."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format=json", "--target-version=py311"]
    # F722: a jaxtyping shape is a string, not a forward reference
    done = subprocess.run([*ruff, "--select=F,ARG", "--ignore=F722", *map(str, paths)], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    for fault in json.loads(done.stdout):
        yield (
            Path(fault["filename"]),
            f"cell {fault['cell']}, line {fault['location']['row']}: {fault['message']} ({fault['code']})",
        )


def lint(paths):
    found = [
        (path, fault) for path in paths for fault in faults(nbformat.read(path, as_version=4), path.parent.name == "solutions")
    ]
    found += code_faults(paths) if paths else []
    for path, fault in sorted(found, key=lambda pair: pair[0]):
        print(f"{_shown(path)}: {fault}")
    print(f"{len(paths)} notebooks, {len(found)} faults")
    return bool(found)


def _shown(path):
    return os.path.relpath(path, course.ROOT)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "lint"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--fresh", action="store_true", help="take this machine's outputs where the machine is the answer")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time; more than one disturbs what they time")
    args = parser.parse_intermixed_args(arguments)  # so that options may stand before the paths, as written above
    paths = [path.resolve() for path in args.paths] or sorted(
        p for p in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
    )
    return int(lint(paths) if args.command == "lint" else run(paths, args.fresh, args.jobs))


if __name__ == "__main__":
    sys.exit(main())
