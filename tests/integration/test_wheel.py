"""The wheel as somebody else installs it: complete, light, and with its entry points."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        timeout=300,
    )
    (built,) = folder.glob("otel_retry-*.whl")
    return built


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "otel_retry/py.typed" in names
    assert "otel_retry/demo/shop.py" in names
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True, timeout=500
    )
    return folder / "bin"


@pytest.mark.timeout(900)
def test_pip_install_is_all_it_takes(installed: Path, tmp_path: Path) -> None:
    script = "import otel_retry, sys; otel_retry.instrument(); sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([installed / "python", "-c", script], check=True, timeout=60, cwd=tmp_path)
    assert (installed / "opentelemetry-instrument").exists()
    assert (installed / "otel-retry").exists()


@pytest.mark.timeout(900)
def test_the_installed_wheel_writes_the_dashboards_and_the_rules(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    """Those that the repository has, byte for byte, with no repository near."""
    subprocess.run(
        [installed / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cli]"], check=True, timeout=500
    )
    command = [installed / "otel-retry", "dashboards", "export", tmp_path / "out"]
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / "dashboards").iterdir() if path.is_file()}
    assert written == kept
