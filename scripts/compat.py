"""Run the test suite on several releases of transformers, each in an environment of its own, and print a table.

    python scripts/compat.py                      # all releases below, about four minutes each
    python scripts/compat.py --releases 5.5 5.23

Environments live in .compat/ and are kept, so that a second run starts at once; if pyproject.toml or constraints.txt
has changed, they are made anew. The exit status is 1 if one fails.
"""

import hashlib
import re
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser


ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".compat"
REQUIREMENTS = ["hypothesis", "pytest", "pytest-xdist"]
# These are about data that has not met the library yet.
WITHOUT_LIBRARY = [f"tests/test_{name}.py" for name in ("questions", "formats", "scene", "synthetic")]


@dataclass
class Arguments:
    releases: list[str] = field(
        default_factory=lambda: ["5.5", "5.10", "5.16", "5.18", "5.23"],
        metadata={"help": "minor releases of transformers; the newest patch of each is tried"},
    )


def requirements() -> str:
    """What tells the required packages from those of another day."""
    whole = hashlib.sha256("\n".join(REQUIREMENTS).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        whole.update((ROOT / name).read_bytes())
    return whole.hexdigest()


def environment(release: str) -> Path:
    """The Python of an environment with that release, made on first use and where other packages are required."""
    folder = FOLDER / release
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = requirements()
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        constraints = folder / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("transformers==")) + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
        subprocess.run([*install, f"transformers=={release}.*", *REQUIREMENTS, "-e", f"{ROOT}[train]"], check=True)
        ready.write_text(wanted)
    return python


def run_tests(release: str) -> tuple[str, str, bool]:
    """Full version, the last line of pytest, and whether it passed."""
    python = environment(release)
    version = subprocess.check_output(
        [python, "-c", "import transformers; print(transformers.__version__)"], text=True
    )
    command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    command += [f"--ignore={path}" for path in WITHOUT_LIBRARY]
    tests = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (FOLDER / f"{release}.log").write_text(tests.stdout)
    lines = [line for line in tests.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return version.strip(), lines[-1].strip("= ") if lines else "no tests ran", tests.returncode == 0


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    rows = []
    for release in arguments.releases:
        print(f"transformers {release} ...", flush=True)
        rows.append(run_tests(release))
    print(f"\n{'transformers':<14}{'':<8}tests")
    for version, summary, passed in rows:
        print(f"{version:<14}{'pass' if passed else 'FAIL':<8}{summary}")
    if not all(passed for *_, passed in rows):
        sys.exit(f"failed; the logs are in {FOLDER}")


if __name__ == "__main__":
    main()
