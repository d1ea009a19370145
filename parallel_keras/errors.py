"""The errors of the package: what a user may catch."""


class UnsupportedError(ValueError):
    """What was asked for cannot be done exactly, so it is refused.

    Raised before the first step. The text says what was received, what is
    supported and what to change.
    """


class WorkerError(RuntimeError):
    """A worker process died, raised or hung.

    Attributes:
        rank: Int. The rank of the worker that failed, or `None` where it
            cannot be told.
        reason: String. How it failed, in a few words.
    """

    def __init__(self, message, rank=None, reason=""):
        super().__init__(message)
        self.rank = rank
        self.reason = reason

    def with_note(self, note):
        """The same error with a sentence more, where there is one."""
        return WorkerError(f"{self}\n\n{note}", self.rank, self.reason) if note else self
