"""Pages that processes load, in a program of its own: test_options.py runs it.

Keras forks these processes, which in plain Keras too can hang where a framework's threads
have run before, as they have in a process of many tests.
"""

import sys

import parallel_keras  # noqa: F401  fixes TensorFlow's CPU devices before it starts

if __name__ == "__main__":
    from harness import compare
    from test_options import WEIGHTS, pages, train

    source = pages(workers=2, use_multiprocessing=True)
    # The strategy first: before plain Keras's threads have run.
    received = train(sys.argv[1], source, class_weight=WEIGHTS)
    compare("options_processes", sys.argv[1], train(None, source, class_weight=WEIGHTS), received)
