"""Every example, and every code block of the README and the docs, runs as it stands."""

import pathlib
import re

import pytest
from programs import BACKENDS, run

from parallel_keras import capabilities

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(path):
    """The Python blocks of a document, which read on from one another."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def in_turn(paths, both=(), either=()):
    """pytest parameters `path, backend`.

    `make test` runs one path on one backend and the next on the other; `make test-all`
    runs all on both.

    Args:
        paths: List of paths.
        both: Names of those that `make test` runs on both.
        either: Names of those that use both backends themselves.
    """
    return [
        pytest.param(
            path,
            backend,
            id=f"{path.name}-{backend}",
            marks=[] if path.name in both or number % 2 == turn else pytest.mark.long,
        )
        for number, path in enumerate(paths)
        for turn, backend in enumerate(BACKENDS)
        if path.name not in either or number % 2 == turn
    ]


@pytest.mark.parametrize(
    ("path", "backend"), in_turn([path for path in DOCUMENTS if blocks(path)], both=["README.md"])
)
def test_code_blocks_run(path, backend, tmp_path):
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks(path)))
    done = run([str(script)], backend, cwd=tmp_path)
    assert done.returncode == 0, f"{path.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("path", "backend"), in_turn(EXAMPLES, either=["quickstart.py"]))
def test_examples_run(path, backend):
    done = run([str(path)], backend, timeout=240, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_table_of_capabilities_is_the_codes_own():
    assert capabilities.as_markdown() in (ROOT / "docs" / "capabilities.md").read_text()


def test_links_between_documents_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
