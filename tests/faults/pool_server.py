"""What the workers of test_pool.py do: each message is a method's name and its arguments."""

import os
import subprocess
import sys
import time

import torch


class Server:
    def __init__(self, context):
        self.context = context

    def handle(self, message):
        name, *arguments = message
        getattr(self, f"on_{name}")(*arguments)

    def on_echo(self, *things):
        self.context.send(("echo", *things))

    def on_facts(self):
        facts = {
            "pid": os.getpid(),
            "path": list(sys.path),
            "package": sys.modules["parallel_keras"].__file__,
            "tensorflow": "tensorflow" in sys.modules,
            "threads": torch.get_num_threads(),
            "world_size": self.context.world_size,
            "default_group": torch.distributed.is_initialized(),
        }
        self.context.send(("facts", facts))

    def on_sum(self, values):
        tensor = torch.tensor(values) * (self.context.rank + 1)
        self.context.group.allreduce([tensor]).wait()

    def on_ddp(self):
        from test_pool import gradient_of_a_rank

        gradient = gradient_of_a_rank(self.context.group, self.context.rank)
        self.context.send(("gradient", gradient.tolist()))

    def on_read(self, layout):
        """Send the arrays back, through the outbound buffer."""
        arrays = self.context.inbound.read(layout)
        self.context.send(("read", self.context.outbound.write(0, arrays)))

    def on_publish(self, number, vector, pause=0.0):
        time.sleep(pause)
        self.context.board.publish(number, vector)

    def on_print(self, text, end="\n"):
        print(text, end=end, flush=True)
        print(text, end=end, file=sys.stderr, flush=True)

    def on_raise(self, text):
        raise ArithmeticError(text)

    def on_leave(self):
        sys.exit(3)

    def on_kill(self, number):
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stopped process comes here only when it is continued

    def on_exit(self, code):
        os._exit(code)

    def on_sleep(self):
        a_mistake_of_the_users()

    def on_spin(self):
        while True:
            pass

    def on_child(self):
        """A process of the user's, which holds the worker's pipes open."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        self.context.send(("child", child.pid))


def a_mistake_of_the_users():
    time.sleep(600)
