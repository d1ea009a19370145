"""A plain script, `python -i` and a notebook cell, with no main guard."""

import jupyter_client
import pytest
from programs import BACKENDS, SCRIPT, environment, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_script_without_a_main_guard(backend, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = run([str(path)], backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TRAINED") == 1, done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_interactive_python(backend):
    # Line by line, as typed: blank lines end a block there.
    typed = SCRIPT.replace("\ndef ", "\n\ndef ").replace("\nrng", "\n\nrng")
    typed = typed.replace("\nclass ", "\n\nclass ")
    done = run(["-i", "-q"], backend, input=typed)
    assert done.stdout.count("TRAINED") == 1, done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_notebook_cells(backend):
    manager, client = jupyter_client.manager.start_new_kernel(
        kernel_name="python3", env=environment(backend)
    )
    printed = []

    def hear(message):
        content = message["content"]
        printed.append(content.get("text") or "\n".join(content.get("traceback", ())))

    try:
        for cell in (*SCRIPT.split("\n\n"), "pk.shutdown()"):
            client.execute_interactive(cell, timeout=120, output_hook=hear)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(printed).count("TRAINED") == 1, "".join(printed)
