#!/usr/bin/env python3
"""Downloads wheels and what they require, but for packages that another machine has; pip's resolver cannot do that.

A requirement without a wheel comes as its source archive, to be built there. With --site the wheels are also installed
into a folder, less the files that --drop names: unpacking that folder is all that is left to do on the other machine.

python3 tools/bench/gpu_wheels.py --have HAVE.txt --out FOLDER --requirements vllm==0.26.0 ... [--site SITE]
"""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions of the manylinux tags; pip takes those that it is given, and no others."""


def read_have(path: Path) -> dict[str, str]:
    """Versions by canonical name, of ``pip list --format=freeze``; lines without a version have an empty one."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, version = line.split("#")[0].strip().partition("==")
        if name:
            found[canonicalize_name(name.partition(" @")[0])] = version
    return found


def metadata_of(file: Path) -> bytes:
    """The metadata file of a wheel or of a source archive."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
            return wheel.read(name)
    with tarfile.open(file) as archive:
        (name,) = (n for n in archive.getnames() if n.endswith("/PKG-INFO") and n.count("/") == 1)
        found = archive.extractfile(name)
        assert found is not None, f"{file}: {name} is no file"
        return found.read()


def requirements_of(wheel: Path, extras: Iterable[str], python: str) -> list[Requirement]:
    """What a wheel or source archive requires on 64-bit Linux, with these extras."""
    lines = email.message_from_bytes(metadata_of(wheel)).get_all("Requires-Dist") or []
    target = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    target |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    target["implementation_name"], target["platform_python_implementation"] = "cpython", "CPython"
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**target, "extra": extra}) for extra in ("", *extras)):
            found.append(requirement)
    return found


def binary_options(python: str) -> list[str]:
    """pip's options that select wheels for 64-bit Linux and this Python."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--platform=linux_x86_64"]
    return ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms, "--platform=any"]


def download(requirement: Requirement, python: str, folder: Path) -> Path:
    """Downloads a requirement's wheel alone, or its source archive where there is none.

    Raises:
        RuntimeError: pip finds neither.
    """
    before = set(folder.iterdir())
    binary = binary_options(python)
    source = ["--no-binary=:all:", "--no-build-isolation"]
    error = ""
    for kind in (binary, source):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *kind]
        command.append(f"{requirement.name}{requirement.specifier}")
        done = subprocess.run(command, capture_output=True, text=True)
        new = set(folder.iterdir()) - before
        if done.returncode == 0 and len(new) == 1:
            return new.pop()
        error = error or (done.stderr.strip().splitlines() or ["no wheel"])[-1]
    raise RuntimeError(f"{requirement}: {error}")


def version_of(file: Path) -> str:
    """The version in a wheel's or source archive's name."""
    if file.suffix == ".whl":
        return file.name.split("-")[1]
    return file.name.removesuffix(".tar.gz").rpartition("-")[2]


def collect(roots: list[Requirement], have: Mapping[str, str], python: str, folder: Path) -> list[str]:
    """Downloads ``roots``, then what any wheel requires and ``have`` lacks; returns what does not fit, one line each.

    A root is downloaded even where ``have`` has it. The first requirement of a package chooses its version; a later one
    may add extras.

    Raises:
        RuntimeError: a root cannot be had.
    """
    versions, problems, queue = dict(have), [], list(roots)
    named = {canonicalize_name(root.name) for root in roots}
    files: dict[str, Path] = {}
    extras: dict[str, set[str]] = {}
    while queue:
        requirement = queue.pop(0)
        name = canonicalize_name(requirement.name)
        if name not in extras and (name in named or name not in have):
            extras[name] = set()
            try:
                files[name] = download(requirement, python, folder)
            except RuntimeError as error:
                if name in named:
                    raise
                problems.append(str(error))
                continue
            versions[name] = version_of(files[name])
            print(files[name].name, file=sys.stderr, flush=True)
            queue += requirements_of(files[name], requirement.extras, python)
        elif name in files and (new := requirement.extras - extras[name]):
            queue += requirements_of(files[name], new, python)
        extras.setdefault(name, set()).update(requirement.extras)
        version = versions.get(name, "")
        if version and not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement}: the bundle or the machine has {version}")
    return problems


def install(wheels: Sequence[Path], python: str, site: Path, drop: Iterable[str]) -> None:
    """Installs wheels for another Python into ``site`` and deletes what the patterns in ``drop`` match there.

    Raises:
        subprocess.CalledProcessError: pip refuses a wheel.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    command += ["--target", str(site), *binary_options(python), *map(str, wheels)]
    subprocess.run(command, check=True)
    for pattern in drop:
        for path in site.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def main(argv: list[str] | None = None) -> int:
    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own.add_argument("--have", type=Path, help="the machine's pip list --format=freeze; without it: no downloads")
    own.add_argument("--python", default="3.12", help="the machine's Python")
    own.add_argument("--out", type=Path, required=True, help="folder for the wheels")
    own.add_argument("--requirements", nargs="+", type=Requirement, default=[], metavar="NAME==VERSION")
    own.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="requirements of others to leave out")
    own.add_argument("--site", type=Path, help="install the wheels into this folder")
    own.add_argument("--drop", nargs="*", default=[], metavar="GLOB", help="files and folders in SITE to delete")
    arguments = own.parse_args(argv)
    if arguments.have:
        have = {canonicalize_name(name): "" for name in arguments.skip} | read_have(arguments.have)
        for line in collect(arguments.requirements, have, arguments.python, arguments.out):
            print(f"note: {line}", file=sys.stderr)
    if arguments.site:
        install(sorted(arguments.out.glob("*.whl")), arguments.python, arguments.site, arguments.drop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
