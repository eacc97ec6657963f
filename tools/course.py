"""The course's commands, the same on every system: `make lab` is `python tools/course.py lab`.

    lab [option…]      install into .venv what reading needs, check it, open JupyterLab on notebooks/; options go to JupyterLab
    test [part…]       install what checking needs, run every part (tests faults notebooks browser), say what did not run and why
    lint               ruff on code and notebooks, and the notebook lint
    notebooks [path…]  execute and clean notebooks in place
    bench              run every file of benchmarks/
    bench-peers        fetch the other implementations that bench can compare with
    runs [name…]       train the stored runs of notebook 04 again, into data/runs/
    check              say whether the Python that runs this has all that reading needs
    clean [--all]      remove what the commands left behind; with --all, .venv too

Needs Python and nothing else. (No syntax newer than Python 3.6 in this file: an old Python must be able to read why it is refused.)
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
REPORTS = ROOT / "build" / "tests"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_BROWSERS = ("Chromium", "Google Chrome")
WORKERS = 8  # at most; each may hold a notebook, a kernel and a browser
MINUTES = int(os.environ.get("MOE_TEST_MINUTES", "45"))  # after which `test` stops a part that hangs


def say(words):
    print("\n== " + words, flush=True)


# --- installing ------------------------------------------------------------------------------------------------------


def oldest_python():
    """The lower end of requires-python, as a tuple."""
    found = re.search(r'^requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    return int(found.group(1)), int(found.group(2))


def refuse_old_python(version, name, which=shutil.which):
    oldest = oldest_python()
    if tuple(version[:2]) < oldest:
        newer = [n for n in (f"python3.{minor}" for minor in range(oldest[1], oldest[1] + 10)) if which(n)]
        hint = "make lab PYTHON=" + newer[-1] if newer else "install one, then: make lab PYTHON=/path/to/it"
        given = ".".join(str(part) for part in version[:3])
        raise SystemExit(f"{name} is Python {given}; the course needs {oldest[0]}.{oldest[1]} or newer.\nTry: {hint}")


def fingerprint():
    """Changes when the wanted packages do, or when the checkout has moved."""
    files = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    return hashlib.sha256(files + str(ROOT).encode()).hexdigest()


def retrying(attempt, times=3, pause=10, sleep=time.sleep):
    """Call `attempt` until it returns 0, at most `times` times, waiting longer each time. Returns the last status."""
    for n in range(1, times + 1):
        status = attempt()
        if status == 0 or n == times:
            return status
        print(f"That failed; another try in {pause * n} s ({n + 1} of {times}).", flush=True)
        sleep(pause * n)
    return status


def install(extra):
    """Have .venv hold the package with this extra, at the versions of constraints.txt. At once when it already does."""
    wanted = fingerprint()
    stamps = {"lab": ("lab", "test"), "test": ("test",)}[extra]  # test holds all of lab
    if PYTHON.exists() and any(_read(VENV / ("." + stamp)) == wanted for stamp in stamps):
        return
    refuse_old_python(sys.version_info, sys.executable)
    if not PYTHON.exists() or subprocess.call([str(PYTHON), "-c", "import pip"], stderr=subprocess.DEVNULL):
        say("Making .venv")
        if subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)]):
            raise SystemExit("Python could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv")
    say("Installing the course and what it needs into .venv (a few minutes the first time)")
    pip = [str(PYTHON), "-m", "pip", "install", "--retries", "10", "--disable-pip-version-check"]
    if retrying(lambda: subprocess.call(pip + ["-c", "constraints.txt", "-e", f".[{extra}]"], cwd=str(ROOT))):
        raise SystemExit("pip could not install the course; its last lines say why. Is the network there? Then try again.")
    if subprocess.call([str(PYTHON), __file__, "check"]):
        raise SystemExit("The install is not complete. To start afresh: make clean ARGS=--all, then the same command.")
    (VENV / ("." + extra)).write_text(wanted)


def _read(path):
    return path.read_text() if path.exists() else None


def check():
    """Import what the notebooks import, find the kernel they name, compute one small thing. Returns what is wrong, line by line."""
    import importlib

    wrong = []
    for name in "torch numpy matplotlib.font_manager ipywidgets jaxtyping tqdm ipykernel jupyterlab moe_lib".split():
        try:
            importlib.import_module(name)
        except Exception as error:
            wrong.append(f"{name} cannot be imported: {error!r}")
    if wrong:
        return wrong
    import jupyterlab
    import torch
    from jupyter_client.kernelspec import KernelSpecManager

    import moe_lib

    if Path(moe_lib.__file__).resolve().parent != ROOT / "moe_lib":
        wrong.append(f"moe_lib is imported from {moe_lib.__file__}, not from this checkout")
    kernel = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])  # a bare `python` means this one
    if kernel.is_absolute() and kernel.parent.resolve() != Path(sys.executable).parent.resolve():
        wrong.append(f"the kernel 'python3' runs {kernel}, not {sys.executable}; see `jupyter kernelspec list`")
    shape = list(moe_lib.SwiGLUExpert(4, 8)(torch.ones(2, 4)).shape)
    if shape != [2, 4]:
        wrong.append(f"an expert of width 4 gave shape {shape} for [2, 4]")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__} on {device}, JupyterLab {jupyterlab.__version__}")
    return wrong


# --- a browser -------------------------------------------------------------------------------------------------------


def find_chromium(python=PYTHON):
    """The path of a Chromium that starts: $CHROMIUM, one on the PATH, an installed application, or playwright's own; else None."""
    if os.environ.get("CHROMIUM"):
        return os.environ["CHROMIUM"]
    for path in [shutil.which(name) for name in BROWSERS]:
        # an Ubuntu without snapd has a `chromium-browser` that only says how to install it
        if path and subprocess.call([path, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            return path
    applications = [Path(f"/Applications/{name}.app/Contents/MacOS/{name}") for name in MAC_BROWSERS]
    code = "from playwright.sync_api import sync_playwright as s\nwith s() as p: print(p.chromium.executable_path)"
    own = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return next((str(path) for path in applications + [Path(own.stdout.strip() or "-")] if path.exists()), None)


def install_chromium():
    """Through apt where it has one and we may, else playwright's own. Returns the path, or None."""
    if find_chromium():
        return find_chromium()
    say("Installing Chromium for the browser tests")
    release = _read(Path("/etc/os-release")) or ""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    sudo = [] if root else ["sudo", "-n"]
    may = root or (shutil.which("sudo") and subprocess.call(sudo + ["true"], stderr=subprocess.DEVNULL) == 0)
    if may and shutil.which("apt-get") and "ID=debian" in release.split():  # Ubuntu's package is only a pointer to a snap
        apt = sudo + ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "Acquire::Retries=3", "-qq"]
        if retrying(lambda: subprocess.call(apt + ["update"])) == 0:
            retrying(lambda: subprocess.call(apt + ["install", "-y", "--no-install-recommends", "chromium", "fonts-liberation"]))
    if not find_chromium():
        with_system_libraries = ["--with-deps"] if may and shutil.which("apt-get") else []
        retrying(lambda: subprocess.call([str(PYTHON), "-m", "playwright", "install", "chromium"] + with_system_libraries), times=2)
    return find_chromium()


NO_CHROMIUM = (
    "no Chromium, and neither apt nor `playwright install chromium` could install one; install Chromium or Chrome, "
    "or name one: CHROMIUM=/path/to/it make test"
)

# --- testing ---------------------------------------------------------------------------------------------------------


def parts(cores):
    """What `test` runs, part by part: the arguments that each gives to pytest."""
    workers = min(cores, WORKERS)
    spread = ["-n", str(workers), "--dist"] if workers > 1 else []
    by_file, one_by_one = (spread + ["loadfile"], spread + ["load"]) if spread else ([], [])
    notebook = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=180"]
    return {
        "tests": ["tests", "--ignore=tests/browser", "--ignore=tests/faults"] + by_file,
        "faults": ["tests/faults"],  # these kill ranks and watch the clock: one at a time
        "notebooks": ["notebooks"] + notebook + by_file,
        "browser": ["tests/browser"] + one_by_one,
    }


def environment():
    """Keeps the user's own settings, and the network, out of the notebooks."""
    home = REPORTS / "home"
    env = dict(os.environ, PYDEVD_DISABLE_FILE_VALIDATION="1", HF_HUB_OFFLINE="1")
    for name in ("JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        env[name] = str(home / name.lower())
        Path(env[name]).mkdir(parents=True, exist_ok=True)
    # Once, here: whoever builds matplotlib's font list says so, and in a notebook that would be an output.
    subprocess.call([str(PYTHON), "-c", "import matplotlib.font_manager"], env=env, stderr=subprocess.DEVNULL)
    return env


def run_part(name, arguments, env, seconds):
    """One pytest run: its exit status, and None or the reason why it ended before its time."""
    command = [str(PYTHON), "-m", "pytest", "-q", f"--junitxml={REPORTS / name}.xml"] + arguments
    process = subprocess.Popen(command, cwd=str(ROOT), env=env, start_new_session=os.name != "nt")
    try:
        return process.wait(timeout=max(seconds, 1)), None
    except subprocess.TimeoutExpired:
        _stop(process)
        return 1, f"stopped: `test` may take {MINUTES} minutes (MOE_TEST_MINUTES)"
    except KeyboardInterrupt:
        _stop(process)
        raise


def _stop(process):
    if os.name == "nt":
        subprocess.call(["taskkill", "/F", "/T", "/PID", str(process.pid)])
    else:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_report(path):
    """Of a junit file: how many passed, how many failed, and how often each reason for not running was given."""
    passed, failed, reasons = 0, 0, Counter()
    for case in ElementTree.parse(str(path)).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skipped is None:
            passed += 1
        else:
            where = "{} {}: ".format(case.get("classname"), case.get("name")) if skipped.get("message") in ("", "Skipped") else ""
            reasons[where + " ".join((skipped.get("message") or "skipped").split())] += 1
    return passed, failed, reasons


def table(rows):
    """The last thing that `test` prints. rows: (part, passed, failed, seconds, Counter of reasons)."""
    lines = ["part        passed  failed  not run  seconds"]
    for part, passed, failed, seconds, reasons in rows:
        lines.append(f"{part:<10} {passed:7} {failed:7} {sum(reasons.values()):8} {seconds:8.0f}")
    missed = [(part, reason, count) for part, _, _, _, reasons in rows for reason, count in sorted(reasons.items())]
    lines += ["", "Did not run, and why:" if missed else "Everything ran."]
    lines += [f"{part:<10} {count:3} × {reason}" for part, reason, count in missed]
    return "\n".join(lines)


def test(names):
    install("test")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = parts(cores)
    for name in names:
        if name not in known:
            raise SystemExit("no part {!r}; the parts are: {}".format(name, " ".join(known)))
    shutil.rmtree(str(REPORTS), ignore_errors=True)
    env = environment()
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // min(cores, WORKERS))))
    end, rows, ok = time.time() + 60 * MINUTES, [], True
    for name in names or known:
        if name == "faults" and not (ROOT / "tests" / "faults").is_dir():
            continue
        if name == "browser":
            chromium = install_chromium()
            if chromium is None:
                rows.append((name, 0, 0, 0, Counter([NO_CHROMIUM])))
                ok = ok and not os.environ.get("CI")  # a reader may do without; CI must have one
                continue
            env["CHROMIUM"] = chromium
        say("pytest " + " ".join(known[name]))
        start = time.time()
        status, stopped = run_part(name, known[name], env, end - start)
        try:
            passed, failed, reasons = read_report(REPORTS / (name + ".xml"))
        except (OSError, ElementTree.ParseError):
            passed, failed, reasons = 0, 1, Counter([stopped or f"pytest ended with status {status} and left no report"])
        rows.append((name, passed, failed, time.time() - start, reasons))
        ok = ok and status == 0
    say("Summary\n" + table(rows))
    return 0 if ok else 1


# --- the rest --------------------------------------------------------------------------------------------------------


def all_of(*commands):
    """Run every command, even after one that fails; 1 if any failed."""
    failed = 0
    for command in commands:
        say(" ".join(command))
        failed |= subprocess.call([str(PYTHON)] + list(command), cwd=str(ROOT)) != 0
    return int(failed)


def lab(options):
    install("lab")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options = ["--allow-root"] + options
    # The root is the checkout, so that links from notebooks into moe_lib open; the first thing shown is notebooks/.
    place = [f"--ServerApp.root_dir={ROOT}", "--LabApp.default_url=/lab/tree/notebooks"]
    try:
        return subprocess.call([str(PYTHON), "-m", "jupyterlab"] + place + options, cwd=str(ROOT))
    except KeyboardInterrupt:
        return 0


def lint():
    install("test")
    return all_of(("-m", "ruff", "check", "."), ("-m", "ruff", "format", "--check", "."), ("tools/notebooks.py", "lint"))


def notebooks(paths):
    install("test")
    return all_of(("tools/notebooks.py", "run") + tuple(paths))


def bench():
    install("test")
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    if not files:
        raise SystemExit("benchmarks/ holds nothing to run")
    return all_of(*[(str(file.relative_to(ROOT)),) for file in files])


def runs(names):
    install("test")
    return all_of(("tools/runs.py",) + tuple(names))


def bench_peers():
    install("test")
    return all_of(("benchmarks/peers.py", "--fetch"))


def clean(everything):
    left = [ROOT / n for n in ("build", "dist", ".pytest_cache", ".ruff_cache", ".hypothesis")] + list(ROOT.glob("*.egg-info"))
    for folder in ("moe_lib", "tests", "tools", "benchmarks", "notebooks"):
        left += [p for name in ("__pycache__", ".ipynb_checkpoints") for p in (ROOT / folder).rglob(name)]
    for path in left + ([VENV] if everything else []):
        shutil.rmtree(str(path), ignore_errors=True)
    return 0


def main(arguments):
    command, rest = (arguments or ["help"])[0], arguments[1:]
    if command in ("lab", "test", "notebooks", "runs"):
        return {"lab": lab, "test": test, "notebooks": notebooks, "runs": runs}[command](rest)
    if command in ("lint", "bench", "bench-peers"):
        return {"lint": lint, "bench": bench, "bench-peers": bench_peers}[command]()
    if command == "clean":
        return clean("--all" in rest)
    if command == "check":
        wrong = check()
        print("\n".join(wrong) if wrong else "All that reading needs is here.")
        return 1 if wrong else 0
    print(__doc__)
    return 0 if command in ("help", "-h", "--help") else 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
