"""The package as it is installed, and the commands that README promises."""

from __future__ import annotations

import configparser
import email
import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_accept.version import __version__

ROOT = Path(__file__).resolve().parents[1]


def readme_command(name: str) -> str:
    """The one command that follows ``<!-- command: name -->`` in README."""
    found = re.findall(
        rf"^<!-- command: {name} -->\n```bash\n(.*?)```$", (ROOT / "README.md").read_text(), flags=re.M | re.S
    )
    assert len(found) == 1, f"README has {len(found)} commands marked {name}"
    return str(found[0]).strip()


@pytest.mark.parametrize("name", ["first", "tests"])
def test_readme_command_is_one_line_and_sets_itself_up(name: str) -> None:
    command = readme_command(name)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_readme_names_only_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\b(?:examples|benchmarks|configs|docs)/[\w/.-]+\.\w+", readme):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / path).exists(), path


PYTHON3 = """#!/bin/sh
# In place of python3: 'python3 -m venv FOLDER' makes an environment whose tools only write down how they were called.
[ "$1 $2" = "-m venv" ] || exit 64
mkdir -p "$3/bin"
for tool in pip ruff mypy pytest python; do
    cp "$TOOL" "$3/bin/$tool"
done
"""
TOOL = """#!/bin/sh
echo "$0 $*" >> "$CALLS"
[ "$(basename "$0")" != "$FAILING" ]
"""


@pytest.fixture
def ci_run(tmp_path: Path):
    """Runs ``.ci/run`` with stand-ins for all tools; returns its exit status and the calls in order."""
    for name, text in (("bin/python3", PYTHON3), ("tool", TOOL)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    calls = tmp_path / "calls"

    def run(failing: str = "") -> tuple[int, list[str]]:
        env = dict(
            os.environ,
            PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin",
            TMPDIR=str(tmp_path),
            TOOL=str(tmp_path / "tool"),
            CALLS=str(calls),
            FAILING=failing,
        )
        done = subprocess.run([ROOT / ".ci/run"], env=env, capture_output=True, text=True, timeout=60)
        lines = calls.read_text().splitlines()
        calls.unlink()
        # The environment lies in a temporary folder, which must be gone again.
        folder = str(Path(lines[0].split()[0]).parents[1])
        assert folder.startswith(str(tmp_path)) and not Path(folder).exists()
        return done.returncode, [line.replace(folder, ".venv") for line in lines]

    return run


def test_ci_runs_lint_types_and_the_tests_as_readme_gives_them(ci_run) -> None:
    status, calls = ci_run()
    assert status == 0
    assert calls[1:4] == [".venv/bin/ruff check .", ".venv/bin/ruff format --check .", ".venv/bin/mypy "]
    steps = [step.replace("'", "") for step in readme_command("tests").split(" && ")]
    assert steps[0] == "python3 -m venv .venv"  # done by the stand-in, which writes nothing down
    assert [call.strip() for call in calls[4:]] == steps[1:]


@pytest.mark.parametrize("tool", ["pip", "ruff", "mypy", "pytest"])
def test_ci_fails_when_a_tool_fails(ci_run, tool: str) -> None:
    status, calls = ci_run(failing=tool)
    assert status != 0
    assert f"/{tool} " in calls[-1], "nothing runs after the failure"


def test_importing_the_package_leaves_lightning_alone() -> None:
    code = (
        "import sys, lightning_accept; print(*({'lightning', 'pytorch_lightning', 'torchvision'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the working tree without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"lightning_accept-{__version__}.dist-info/"
    packed = {name for name in wheel.namelist() if not name.startswith(info)}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_accept").rglob("*.py")}
    assert packed == sources | {"lightning_accept/py.typed"}
    assert f"{info}licenses/LICENSE" in wheel.namelist()


def test_wheel_says_version_licence_and_python(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"lightning_accept-{__version__}.dist-info/METADATA"))
    assert metadata["Name"] == "lightning-accept"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"codecs", "examples", "test", "dev"} <= set(metadata.get_all("Provides-Extra"))


def test_malicious_lightning_releases_are_excluded(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"lightning_accept-{__version__}.dist-info/METADATA"))
    (lightning,) = [line for line in metadata.get_all("Requires-Dist") if re.match(r"lightning\b(?!-)", line)]
    assert "!=2.6.2" in lightning and "!=2.6.3" in lightning


def test_console_script_leads_to_a_function(wheel: zipfile.ZipFile) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"lightning_accept-{__version__}.dist-info/entry_points.txt").decode())
    module, function = scripts["console_scripts"]["lightning-accept"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
