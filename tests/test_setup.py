"""The way in: `make`, the interpreter it finds, `environment.yml`, and how git shows a notebook.

The set-up itself takes minutes and gigabytes. Here a stand-in interpreter plays Python's part: it makes a
`.venv` that is again a stand-in, and writes down each call.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook

from course_lib.classroom.notebooks.clean import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

STAND_IN = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  *"version_info < (3, 11)"*) exit {too_old} ;;
  *"version_info[:3]"*) echo {version} ;;
  *"import venv, ensurepip"*) exit {no_venv} ;;
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"pip install"*) {install} ;;
  "-m jupyterlab"*|"-m pytest"*) echo "MPLBACKEND=$MPLBACKEND $*" ;;
esac
"""


class Checkout:
    """A folder with the Makefile, a git repository, and a stand-in for Python; its path contains a space."""

    def __init__(self, path: Path, **stand_in: str):
        self.path, self.log = path / "my course", path / "calls"
        self.path.mkdir()
        for name in ("Makefile", "pyproject.toml", ".gitattributes", ".gitignore"):
            shutil.copy(ROOT / name, self.path)
        self.python = path / "python stand-in"
        self.become(**stand_in)

    def become(self, too_old="0", version="3.12.4", no_venv="0", install="true") -> None:
        text = STAND_IN.format(
            log=self.log, too_old=too_old, version=version, no_venv=no_venv, install=install
        )
        for place in (self.python, self.path / ".venv/bin/python"):
            if place.parent.exists():
                place.write_text(text)
                place.chmod(0o755)

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", *words]
        if not any(word.startswith("PYTHON=") for word in words):
            command.append(f"PYTHON={self.python}")
        clean = {
            k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "PYTHON", "PIP_ARGS"}
        }
        return subprocess.run(
            command, cwd=self.path, env={**clean, **env}, capture_output=True, text=True, timeout=30
        )

    def installs(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "pip install" in line]

    @property
    def stamp(self) -> Path:
        return self.path / ".venv" / ".installed"


def test_it_sets_up_once_and_again_when_the_dependencies_change(tmp_path):
    checkout = Checkout(tmp_path)
    done = checkout.make("test", "TEST_ARGS=-k ring", "PIP_ARGS=--extra-index-url http://x", MPLBACKEND="Agg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "MPLBACKEND= -m pytest -k ring"
    assert [call.split("version-check ")[1] for call in checkout.installs()] == [
        "--extra-index-url http://x -e .[test,dev]"
    ]
    again = ("test", "PIP_ARGS=--extra-index-url http://x")
    assert checkout.make(*again).returncode == 0 and len(checkout.installs()) == 1, "nothing to do"
    later = time.time() + 5
    os.utime(checkout.path / "pyproject.toml", (later, later))
    assert checkout.make(*again).returncode == 0 and len(checkout.installs()) == 2
    os.utime(checkout.path / "pyproject.toml", (1, 1))
    assert checkout.make("test").returncode == 0 and len(checkout.installs()) == 3, "other pip arguments"


@pytest.mark.parametrize(
    "stand_in, sentence",
    [
        ({"too_old": "1", "version": "3.9.2"}, "is Python 3.9.2; the course needs Python 3.11 or newer."),
        ({"no_venv": "1"}, "has no venv module. On Debian and Ubuntu: apt install python3.12-venv"),
        ({"install": "exit 1"}, "pip could not install what pyproject.toml lists"),
    ],
    ids=["too old", "no venv", "pip fails"],
)
def test_it_says_what_is_missing(tmp_path, stand_in, sentence):
    checkout = Checkout(tmp_path, **stand_in)
    done = checkout.make("test")
    assert done.returncode != 0 and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not checkout.stamp.exists()
    checkout.become()
    assert checkout.make("test").returncode == 0 and checkout.stamp.exists(), "the next try takes it up"


def test_an_interpreter_that_does_not_exist(tmp_path):
    done = Checkout(tmp_path).make("lab", "PYTHON=/no/such/python")
    assert done.returncode != 0
    assert "PYTHON=/no/such/python does not run: there is no such Python interpreter." in done.stderr


def test_no_python_at_all(tmp_path):
    checkout, tools = Checkout(tmp_path), tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "make", "cat", "rm", "git"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = checkout.make("lab", "PYTHON=", PATH=str(tools))
    assert done.returncode != 0 and "There is no Python 3.11 or newer here" in done.stderr
    assert "make PYTHON=/path/to/python3.12 lab" in done.stderr


def test_what_the_makefile_asks_of_an_interpreter_is_python():
    """New enough? Which version? With venv? The stand-in only recognises these questions."""
    questions = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-c '" in line]
    asked = [line.split("-c '")[1].split("'")[0] for line in questions]
    assert len(asked) == 3
    for code in asked:
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0, code


def test_an_interrupted_install_is_taken_up_again(tmp_path):
    checkout = Checkout(tmp_path, install="sleep 60")
    command = ["make", f"PYTHON={checkout.python}", "test"]
    running = subprocess.Popen(
        command,
        cwd=checkout.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + 20
    while not (checkout.log.exists() and checkout.installs()) and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGTERM)  # SIGINT may be ignored where the tests run
    assert running.wait(10) != 0 and not checkout.stamp.exists()
    checkout.become()
    assert checkout.make("test").returncode == 0 and checkout.stamp.exists()


def test_another_interpreter_makes_the_environment_anew(tmp_path):
    checkout = Checkout(tmp_path)
    assert checkout.make("test").returncode == 0
    other = tmp_path / "other"
    shutil.copy(checkout.python, other)
    other.write_text(other.read_text().replace("3.12.4", "3.13.0"))
    done = checkout.make("test", f"PYTHON={other}")
    assert done.returncode == 0 and "Setting up .venv with Python 3.13.0" in done.stdout


def test_lab_serves_this_machine_only_and_needs_no_display(tmp_path):
    shown = Checkout(tmp_path).make("lab", "PORT=9999", DISPLAY="", WAYLAND_DISPLAY="", BROWSER="").stdout
    assert "-m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.port=9999" in shown
    assert "--LabApp.default_url=/lab/tree/notebooks" in shown
    assert ("--allow-root" in shown) == (os.geteuid() == 0)
    assert ("--no-browser" in shown) == (sys.platform == "linux")
    assert "token" not in shown.split("jupyterlab")[1], "the token stays"


def test_help_names_every_command():
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=30)
    for command in ("lab", "test", "check", "run", "notebooks", "bench"):
        assert f"make {command} " in done.stdout


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = environment["dependencies"]
    groups = ",".join(project["optional-dependencies"])
    assert conda == [f"python{project['requires-python']}", "pip"]
    assert pip == {"pip": [f"-e .[{groups}]"]}, "no second list of dependencies"
    assert f"-e '.[{groups}]'" in (ROOT / "Makefile").read_text()


def test_the_ci_script_is_executable_bash():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert script.read_text().rstrip().splitlines()[-1].startswith("make test")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_shows_a_notebook_as_its_cells(tmp_path):
    pytest.importorskip("nbdime")
    checkout = Checkout(tmp_path)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *words], cwd=checkout.path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    git("init", "-q")
    assert checkout.make("setup").returncode == 0
    notebook = checkout.path / "notebooks" / "a.ipynb"
    notebook.parent.mkdir()
    cells = [new_code_cell("x = 1\nprint(x)"), new_code_cell("y = 2")]
    notebook.write_text(nbformat.writes(new_notebook(cells=cells)))
    git("add", ".")
    git("commit", "-qm", "one")
    cells[0].source = "x = 3\nprint(x)"
    notebook.write_text(nbformat.writes(new_notebook(cells=cells)))
    (checkout.path / ".venv/bin/python").unlink()
    assert '+    "x = 3\\n",' in git("diff"), "without .venv: the raw file, and no error"
    (checkout.path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (checkout.path / ".venv/bin/python").chmod(0o755)
    changed = [
        line for line in git("diff").splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changed == ["-    x = 1", "+    x = 3"]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files_of_the_checkout(name):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    links += re.findall(r'<img[^>]* src="([^":]+)"', (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_lists_every_chapter():
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"[`{path.stem}`](notebooks/{path.name})" in readme
