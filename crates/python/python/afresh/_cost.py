"""The cost of a call, and of a command."""

from __future__ import annotations

from dataclasses import dataclass

from . import _native


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of a call, or of a command. An amount that is not known is ``None``.

    That of a command is the use of its sandbox between its start and its end, and processes that ran beside it count.
    Its bytes are its own input and output.

    Attributes:
        wall: Wall-clock time in seconds.
        cpu: CPU time in seconds: of the thread that runs the guest, and of the processes of a Linux program. A wait
            takes none.
        peak_memory: Peak of the guest's memory in bytes: the memories of a Wasm guest, or what the processes of a Linux
            program have mapped together. ``None`` for a micro-VM, whose memory has one size.
        dirty_pages: Pages of memory (4 KiB) that differ from the sandbox's last state; ``None`` in Linux programs, and
            after a run from the warm state, whose memory is dropped.
        input_bytes: Bytes of the request to the guest.
        output_bytes: Bytes that the guest sent: its answer, output, and requests.
        dropped_bytes: Bytes of output and of displayed results that were dropped.
    """

    wall: float
    cpu: float
    peak_memory: int | None
    dirty_pages: int | None
    input_bytes: int
    output_bytes: int
    dropped_bytes: int


NO_COST = CallCost(0.0, 0.0, None, None, 0, 0, 0)


def command_cost(spent: _native.CommandCost, given: int, dropped: int = 0) -> CallCost:
    """The cost of a command with ``given`` bytes of input; ``dropped`` bytes of output were dropped here."""
    wall, cpu, peak, sent, lost = spent
    return CallCost(wall, cpu, peak, None, given, sent, lost + dropped)
