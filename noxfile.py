"""Run the tests on every supported release of transformers, each in its own environment.

    make compat               # all releases, about four minutes each on two cores
    nox -s "tests(5.5)"       # one release

Environments are kept in .nox/ and updated when pyproject.toml or constraints.txt change.
"""

from pathlib import Path

import nox


RELEASES = ["5.5", "5.10", "5.16", "5.18", "5.23"]
# These tests use no more of transformers than the tokenizer, which other tests cover.
WITHOUT_TRANSFORMERS = ["questions", "formats", "scene", "synthetic"]


@nox.session(reuse_venv=True)
@nox.parametrize("release", RELEASES, ids=RELEASES)
def tests(session: nox.Session, release: str) -> None:
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("transformers==")))
    packages = (f"transformers=={release}.*", "hypothesis", "pytest", "pytest-xdist", "-e", ".[train]")
    session.install("-c", str(constraints.resolve()), *packages)
    ignored = [f"--ignore=tests/test_{name}.py" for name in WITHOUT_TRANSFORMERS]
    session.run("pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *ignored)
