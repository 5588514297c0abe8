"""Run the tests on the supported releases of transformers.

    make compat               # all releases; minutes each on two cores
    nox -f .ci/noxfile.py -s "tests(5.5)"       # one release, all tests that use transformers
    nox -f .ci/noxfile.py -s words -- 5.7 5.8   # the tests of generated words only, on these releases

Environments are kept in .nox/ and updated when pyproject.toml or constraints.txt change.
"""

from pathlib import Path

import nox


ROOT = Path(__file__).resolve().parent.parent
nox.options.envdir = str(ROOT / ".nox")

# The first and the last are the supported ones that the documents name. "newest" is what pip finds.
RELEASES = ["5.5", "5.10", "5.16", "5.18", "5.23", "5.24"]
NEWEST = "newest"
BETWEEN = ["5.6", "5.7", "5.8", "5.9", "5.11", "5.12", "5.13", "5.14", "5.15", "5.17", "5.19", "5.20", "5.21", "5.22"]
# These tests use no more of transformers than the tokenizer, which other tests cover.
WITHOUT_TRANSFORMERS = ["questions", "formats", "scene", "synthetic"]
OF_WORDS = ["generation", "golden", "pipeline", "one_answer"]


def install(session: nox.Session, release: str, extras: str) -> None:
    """Install a release of transformers, this package with its extras, and pytest, in versions of constraints.txt."""
    session.chdir(ROOT)
    pins = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("transformers==")))
    transformers = "transformers" if release == NEWEST else f"transformers=={release}.*"
    packages = (transformers, "httpx", "hypothesis", "pytest", "pytest-xdist", "-e", f".[{extras}]")
    session.install("--upgrade", "-c", str(constraints.resolve()), *packages)
    session.run("python", "-c", "import transformers; print('transformers', transformers.__version__)")


@nox.session(reuse_venv=True)
@nox.parametrize("release", [*RELEASES, NEWEST], ids=[*RELEASES, NEWEST])
def tests(session: nox.Session, release: str) -> None:
    install(session, release, "train")
    ignored = [f"--ignore=tests/test_{name}.py" for name in WITHOUT_TRANSFORMERS]
    session.run("pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *ignored)


@nox.session(reuse_venv=True)
def words(session: nox.Session) -> None:
    """In one environment, one release after another, up to the first that fails."""
    for release in session.posargs or BETWEEN:
        install(session, release, "demo,scale,train")
        session.run("pytest", "-q", "-p", "no:cacheprovider", *(f"tests/test_{name}.py" for name in OF_WORDS))
