"""Install the real backends of the end-to-end tests: Prometheus with promtool, the OpenTelemetry Collector, Jaeger,
and the reader of Compose files.

They are built from their released sources, which come from the Go module proxy and are checked against Go's checksum
database: no binary of somebody else's, nothing installed outside `~/.cache/otel_retry`. A folder's name holds the version and a
digest of how it was built, so a second run has nothing to do, and a changed recipe builds anew beside the old. Two runs
at once do not build the same thing twice: the second waits for the first.

    python scripts/backends.py              build what is missing
    python scripts/backends.py --check      say what is missing, build nothing (exit code 1 if anything is)
    python scripts/backends.py prometheus   only this one
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows, where nothing is built; the tests that import this say what is missing
    fcntl = None

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
# Shared by all checkouts of a user: these take a while to build.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otel_retry"
FOLDER = CACHE / "backends"
GO_CACHE = CACHE / "go"
MANIFEST = ROOT / "tests" / "e2e" / "collector-manifest.yaml"

GO_MINIMUM = (1, 26)
GO_VARIABLE = "GO"
HOW_TO = "run `python scripts/backends.py` (needs Go 1.26 or later; about 15 minutes the first time)"

# Go says nothing while it compiles; whoever waits wants to know that something goes on.
PROGRESS_SECONDS = 60.0

# Without symbol tables and paths: half the size, and the same bytes in every checkout.
_FLAGS = ("-trimpath", "-ldflags=-s -w")


class BackendsError(RuntimeError):
    """What is missing or went wrong, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One thing to build: `version` is how its makers name the release, `module` and `tag` how Go finds it."""

    name: str
    version: str
    module: str
    tag: str
    binaries: tuple[str, ...]
    packages: tuple[str, ...] = ()
    tags: str = ""
    manifest: Path | None = None

    @property
    def recipe(self) -> str:
        """A digest of all that decides what comes out."""
        facts = [self.module, self.tag, self.packages, self.tags, _FLAGS]
        if self.manifest is not None:
            facts.append(self.manifest.read_text(encoding="utf-8"))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.name}-{self.version}-{self.recipe}"

    @property
    def installed(self) -> bool:
        return all((self.folder / binary).is_file() for binary in self.binaries)

    def path(self, binary: str | None = None) -> Path:
        return self.folder / (binary or self.binaries[0])


PROMETHEUS = Backend(
    name="prometheus",
    version="3.15.0",
    module="github.com/prometheus/prometheus",
    tag="v0.315.0",  # Go's name of 3.15.0
    binaries=("prometheus", "promtool"),
    packages=("./cmd/prometheus", "./cmd/promtool"),
    tags="netgo,remove_all_sd",  # without the clients of thirty clouds: a third of the time and of the size
)
COLLECTOR = Backend(
    name="otelcol",
    version="0.159.0",
    module="go.opentelemetry.io/collector/cmd/builder",
    tag="v0.159.0",
    binaries=("otelcol",),
    manifest=MANIFEST,
)
JAEGER = Backend(
    name="jaeger",
    version="2.13.0",
    module="github.com/jaegertracing/jaeger",
    tag="v1.76.0",  # the same commit as 2.13.0, whose own tag Go refuses: the module's path has no /v2
    binaries=("jaeger",),
    packages=("./cmd/jaeger",),
)
# Not a backend: it reads docker-compose.yaml as `docker compose` does, on machines without Docker.
COMPOSE = Backend(
    name="compose",
    version="2.16.2",
    module="github.com/compose-spec/compose-go/v2",
    tag="v2.16.2",
    binaries=("cmd",),
    packages=("./cmd",),
)
BACKENDS = (PROMETHEUS, COLLECTOR, JAEGER, COMPOSE)


def missing(backends: Sequence[Backend] = BACKENDS) -> list[Backend]:
    return [backend for backend in backends if not backend.installed]


def find_go() -> Path:
    """`GO`, else the one on PATH, else where Go's own installer puts it."""
    found = os.environ.get(GO_VARIABLE) or shutil.which("go") or "/usr/local/go/bin/go"
    where = f"Get it from https://go.dev/dl/, or set {GO_VARIABLE} to the path of a go command."
    try:
        answer = subprocess.run(
            [found, "env", "GOVERSION"], check=True, capture_output=True, text=True, env=_environment()
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendsError(
            f"The backends are built with Go, and there is none here ({error}). {where}"
        ) from error
    version = re.match(r"go(\d+)\.(\d+)", answer)
    if version is None or (int(version[1]), int(version[2])) < GO_MINIMUM:
        raise BackendsError(
            f"{found} is {answer}, and the backends need go{'.'.join(map(str, GO_MINIMUM))}. {where}"
        )
    return Path(found)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One build at a time in this cache. The system lets go of the lock when its holder ends, however it ends."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run is building: waiting for it ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(backend: Backend, go: Path, *, jobs: int) -> None:
    """Build into a temporary folder and rename it: a folder with the right name is always whole."""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=f".{backend.name}-") as temporary:
        work = Path(temporary)
        output = work / "bin"
        output.mkdir()
        run = _Runner(go=go, jobs=jobs)
        if backend.manifest is not None:
            _build_collector(backend, backend.manifest, run, work, output)
        else:
            _build_module(backend, run, work, output)
        shutil.rmtree(backend.folder, ignore_errors=True)
        output.rename(backend.folder)


def _build_module(backend: Backend, run: _Runner, work: Path, output: Path) -> None:
    """`go install module@version` refuses a module with replace directives, so: fetch it, copy it, build there."""
    fetched = json.loads(
        run("mod", "download", "-json", f"{backend.module}@{backend.tag}", cwd=work, capture=True)
    )
    source = work / "src"
    shutil.copytree(fetched["Dir"], source)
    tags = [f"-tags={backend.tags}"] if backend.tags else []
    run("build", *_FLAGS, *tags, "-o", f"{output}{os.sep}", *backend.packages, cwd=source)


def _build_collector(backend: Backend, manifest: Path, run: _Runner, work: Path, output: Path) -> None:
    """The Collector's own builder writes a main package from the manifest; what it writes is built like the rest."""
    run("install", "-trimpath", f"{backend.module}@{backend.tag}", cwd=work)
    builder = GO_CACHE / "bin" / "builder"
    run.program(str(builder), f"--config={manifest}", "--skip-compilation", cwd=work)
    run("build", *_FLAGS, "-o", str(output / backend.binaries[0]), ".", cwd=work / "otelcol")


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "GOPATH": str(GO_CACHE),
        "GOMODCACHE": str(GO_CACHE / "mod"),
        "GOCACHE": str(GO_CACHE / "build"),
        "GOBIN": str(GO_CACHE / "bin"),
        "GOENV": "off",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",  # Prometheus ships a go.work that names folders which its module leaves out
        "CGO_ENABLED": "0",
    }


class _Runner:
    """Runs Go at low priority: whoever works on this machine comes first."""

    def __init__(self, *, go: Path, jobs: int) -> None:
        self._go = go
        self._environment = {
            **_environment(),
            # The module cache is read-only by default, which `make clean` could not remove.
            "GOFLAGS": f"-modcacherw -p={jobs}",
            # The Collector's builder looks for a command named go.
            "PATH": f"{go.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __call__(self, *arguments: str, cwd: Path, capture: bool = False) -> str:
        return self.program(str(self._go), *arguments, cwd=cwd, capture=capture)

    def program(self, *command: str, cwd: Path, capture: bool = False) -> str:
        nice = ["nice", "-n", "19"] if shutil.which("nice") else []
        began = time.monotonic()
        with subprocess.Popen(
            [*nice, *command],
            cwd=cwd,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=None if capture else subprocess.STDOUT,
        ) as process:
            while True:
                try:
                    output, _ = process.communicate(timeout=PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    what = f"{Path(command[0]).name} {command[1]}"
                    print(f"  {what}: {time.monotonic() - began:.0f} s so far", flush=True)
        if process.returncode:
            tail = "\n".join(output.splitlines()[-30:])
            raise BackendsError(f"`{' '.join(command)}` failed:\n{tail}")
        return output


def main() -> int:
    names = [backend.name for backend in BACKENDS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones: {', '.join(names)} (all)")
    parser.add_argument("--check", action="store_true", help="say what is missing, build nothing")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (one per core)"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such backend: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = tuple(backend for backend in BACKENDS if not options.names or backend.name in options.names)
    absent = missing(chosen)
    for backend in chosen:
        state = "missing" if backend in absent else "installed"
        print(f"{backend.name} {backend.version}: {state} ({backend.folder})", flush=True)
    if options.check or not absent:
        return 1 if absent else 0
    try:
        go = find_go()
        with _alone():
            # What another run has built meanwhile is there.
            for backend in missing(absent):
                print(f"{backend.name} {backend.version}: building, {options.jobs} at once ...", flush=True)
                began = time.monotonic()
                install(backend, go, jobs=options.jobs)
                sizes = ", ".join(
                    f"{name} {backend.path(name).stat().st_size / 1e6:.0f} MB" for name in backend.binaries
                )
                print(
                    f"{backend.name} {backend.version}: done in {time.monotonic() - began:.0f} s, {sizes}",
                    flush=True,
                )
    except BackendsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
