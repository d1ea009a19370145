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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_blocks_run(path, backend, tmp_path):
    code = "\n".join(blocks(path))
    if not code:
        return
    script = tmp_path / "blocks.py"
    script.write_text(code)
    done = run([str(script)], backend, cwd=tmp_path)
    assert done.returncode == 0, f"{path.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_examples_run(path, backend):
    if path.name == "quickstart.py" and backend != BACKENDS[0]:
        return  # it runs both backends itself
    done = run([str(path)], backend, timeout=240, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_table_of_capabilities_is_the_codes_own():
    assert capabilities.as_markdown() in (ROOT / "docs" / "capabilities.md").read_text()


def test_links_between_documents_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
