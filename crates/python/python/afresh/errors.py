"""What goes wrong. Each exception says what failed and the way out, and keeps its cause.

>>> import afresh
>>> issubclass(afresh.TimeLimitError, TimeoutError)
True
"""

from __future__ import annotations

from ._native import (
    AfreshError,
    BusyError,
    GuestError,
    MarshalError,
    OpenError,
    SaveError,
    SessionError,
    StoppedError,
    TimeLimitError,
)

__all__ = [
    "AfreshError",
    "BusyError",
    "CommandError",
    "GuestError",
    "MarshalError",
    "OpenError",
    "ProgramError",
    "SaveError",
    "SessionError",
    "StoppedError",
    "TimeLimitError",
]


class ProgramError(AfreshError):
    """The program threw something and did not catch it.

    When it was an error of a tool, that one is the ``__cause__``.

    Attributes:
        name: The name of the error type in the language of the guest.
        message: The message.
        traceback: Where in the program it happened, as the guest's language shows it; ``None`` if it does not say.
    """

    def __init__(self, name: str, message: str, traceback: str | None = None) -> None:
        super().__init__(name, message, traceback)
        self.name = name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        said = f"{self.name}: {self.message}" if self.message else self.name
        if self.traceback and said in self.traceback:
            return self.traceback.rstrip()
        return f"{said}\n{self.traceback.rstrip()}" if self.traceback else said


class CommandError(AfreshError):
    """A command ended with an exit status other than 0, and its result was checked; or it cannot be started.

    Attributes:
        exit_code: Its exit status; negative for the signal that ended it. As in shells, 127 for a program or a
            directory that does not exist, and 126 for a program that cannot be executed.
        stdout: Its standard output.
        stderr: Its standard error.
    """

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        super().__init__(exit_code, stdout, stderr)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

    def __str__(self) -> str:
        ended = f"exited with {self.exit_code}" if self.exit_code >= 0 else f"was ended by signal {-self.exit_code}"
        return f"the command {ended}: {self.stderr.rstrip()}" if self.stderr.strip() else f"the command {ended}"
