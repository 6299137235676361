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


@pytest.mark.timeout(600)
def test_pip_install_is_all_it_takes(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True, timeout=500)
    script = "import otel_retry, sys; otel_retry.instrument(); sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([python, "-c", script], check=True, timeout=60, cwd=tmp_path)
    assert (python.parent / "opentelemetry-instrument").exists()
    assert (python.parent / "otel-retry").exists()
