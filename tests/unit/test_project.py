"""The files that say what is installed and how: they agree with each other, and what they promise is there."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import course

ROOT = course.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned():
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in pins()}


def wanted():
    return [Requirement(text) for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]]


# --- versions --------------------------------------------------------------------------------------------------------


def test_constraints_are_exact_public_versions_each_named_once():
    for pin in pins():
        assert re.fullmatch(r"==[0-9][\w.]*", str(pin.specifier)), f"{pin} is not one public version"
        assert not (pin.extras or pin.marker or pin.url)
    assert len(pinned()) == len(pins())


def test_every_requirement_has_a_range_that_its_pin_is_in():
    for need in wanted():
        if need.name == PROJECT["name"]:
            assert need.extras <= EXTRAS.keys()
            continue
        assert need.specifier and "==" not in str(need.specifier), f"{need}: pyproject.toml holds ranges, constraints.txt versions"
        version = pinned().get(canonicalize_name(need.name))
        assert version, f"{need.name} is not in constraints.txt"
        assert version in need.specifier, f"constraints.txt has {need.name} {version}, outside {need.specifier}"


def test_all_that_an_install_brings_in_is_pinned():
    """Follows the requirements of what is installed. Left out: what torch pins itself, and what other systems need."""
    seen, todo = set(), [(need.name, need.extras) for need in wanted() if need.name != PROJECT["name"]]
    while todo:
        name, extras = todo.pop()
        name = canonicalize_name(name)
        if (name, frozenset(extras)) in seen or re.match(r"nvidia|cuda|triton", name):
            continue
        seen.add((name, frozenset(extras)))
        assert name in pinned(), f"{name} is installed but not in constraints.txt"
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in ["", *extras]):
                todo.append((need.name, need.extras))


def test_the_package_needs_only_what_it_imports_and_imports_only_what_it_needs():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "moe_lib").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from)\s+(\w+)", sources, re.M)) - set(sys.stdlib_module_names) - {"moe_lib"}
    # another name for it, or what comes with it
    packages = {"PIL": "pillow", "cycler": "matplotlib", "traitlets": "ipywidgets", "IPython": "ipywidgets", "triton": "torch"}
    imported = {packages.get(name, name) for name in imported}
    needed = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert not (extra := imported - needed), f"moe_lib imports {sorted(extra)}; pyproject.toml does not name them"
    assert not (idle := needed - imported), f"pyproject.toml names {sorted(idle)}; moe_lib does not import them"


# --- the conda road --------------------------------------------------------------------------------------------------


def test_environment_yml_says_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment.keys() == {"name", "channels", "dependencies"} and environment["channels"] == ["conda-forge"]
    *conda, pip = environment["dependencies"]
    specs = {need.name: need for need in map(Requirement, conda)}  # a conda spec without a build is a pip spec too
    assert specs.keys() == {"python", "pip"}
    assert specs["python"].specifier == SpecifierSet(PROJECT["requires-python"])
    assert pip.keys() == {"pip"}
    constraints, package = pip["pip"]
    assert constraints == "-c constraints.txt"
    path, extras = re.fullmatch(r"-e (\S+?)\[([\w,]+)\]", package).groups()
    assert (ROOT / path / "pyproject.toml").exists()
    assert set(extras.split(",")) <= EXTRAS.keys() and {"lab", "test"} <= set(extras.split(","))


def test_pip_reads_the_lines_that_conda_hands_it(tmp_path):
    """conda writes the pip part to a requirements file; pip parses that file, and only then finds nothing to install from."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    lines = environment["dependencies"][-1]["pip"]
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("\n".join(line.replace("constraints.txt", str(ROOT / "constraints.txt")) for line in lines))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--dry-run", "--no-cache-dir"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "-r", requirements], cwd=ROOT, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert "Obtaining file://" in said, said
    assert "Invalid requirement" not in said and "does not provide the extra" not in said, said


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build as b; print(b.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"moe_lib"}
    tracked = subprocess.run(["git", "ls-files", "data", "moe_lib"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(names) >= {name.replace("data/", "moe_lib/data/", 1) if name.startswith("data/") else name for name in tracked}
    assert "moe_lib/data/kimi_k2.json" in names


def test_the_package_works_from_its_wheel_alone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import moe_lib; print(moe_lib.__file__); print(moe_lib.KIMI_K2.n_routed_experts)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, experts = done.stdout.split()
    assert where.startswith(str(tmp_path)) and experts == "384"


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_the_documents_tell_a_reader_to_type_exists(name):
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M).group(1).split())
    words = (ROOT / name).read_text(encoding="utf-8")
    typed = "\n".join(re.findall(r"^```.*?^```|^    .*$|`[^`\n]+`", words, re.M | re.S))
    made = {target for line in re.findall(r"\bmake ([a-z ]+)", typed) for target in line.split()}
    assert made <= targets, f"{name} names make {sorted(made - targets)}; the Makefile has {sorted(targets)}"
    for script in re.findall(r"\b(?:tools|benchmarks)[/\\]\w+\.py\b", typed):
        assert (ROOT / script.replace("\\", "/")).exists(), f"{name} names {script}; there is no such file"
    if name == "README.md":
        assert {"lab", "test"} <= made
        environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
        assert re.findall(r"conda activate (\S+)`", words) == [environment["name"]]


@pytest.mark.skipif(not shutil.which("make"), reason="no make here; python tools/course.py needs none")
@pytest.mark.parametrize("target", ["lab", "test", "lint", "notebooks", "bench", "clean"])
def test_make_calls_the_command_of_the_same_name(target):
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # we may run under make
    command = ["make", "-n", target, "PYTHON=some-python", "ARGS=x"]
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.stdout.strip() == f"some-python tools/course.py {target} x"
    assert re.search(rf"^    {target}\b", course.__doc__, re.M)


def test_continuous_integration_types_what_a_reader_types():
    run = ROOT / ".ci" / "run"
    assert (os.name == "nt" or run.stat().st_mode & 0o111) and "make -k lint test" in run.read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [command.split()[:3] for command in commands] == [
        ["python", "tools/course.py", name] for name in ("lab", "test", "lint")
    ]
    assert {system.split("-")[0] for system in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}
