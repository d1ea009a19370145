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
        refusal: String. The text of the `UnsupportedError` that the worker raised, which
            the caller raises too, or `""`.
    """

    def __init__(self, message, rank=None, reason="", refusal=""):
        super().__init__(message)
        self.rank = rank
        self.reason = reason
        self.refusal = refusal

    def for_the_caller(self, note):
        """What the caller raises, with a sentence more, where there is one."""
        if self.refusal:
            return UnsupportedError(_with(self.refusal, note))
        if not note:
            return self
        return WorkerError(_with(self, note), self.rank, self.reason)


def _with(text, note):
    return f"{text}\n\n{note}" if note else f"{text}"
