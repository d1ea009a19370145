"""Messages to a process that may have stopped reading.

A message is written as far as there is room, and the rest as room is made: the caller
never sits inside the kernel, where no limit holds. The format is that in which
`multiprocessing.connection.Connection` reads (`Lib/multiprocessing/connection.py` of
Python 3.11): the number of bytes, and the bytes.
"""

import select
import socket
import struct
import time

_ONE_WRITE = 16384  # a copy up to this size costs less than a second write
_LARGEST = 0x7FFFFFFF  # that four bytes tell


def send_bytes(channel, payload, timeout, check):
    """Write one message.

    Args:
        channel: A `socket.socket` that blocks.
        payload: Bytes.
        timeout: Float, in seconds: how long to wait for room without any.
        check: Called now and then while waiting; raises where that is in vain.

    Raises:
        TimeoutError: No room within `timeout` seconds. Part of the message may be written.
        OSError: The other side is closed.
    """
    size = len(payload)
    header = struct.pack("!iQ", -1, size) if size > _LARGEST else struct.pack("!i", size)
    if size <= _ONE_WRITE:
        _write(channel, header + payload, timeout, check)
    else:
        _write(channel, header, timeout, check)
        _write(channel, payload, timeout, check)


def _write(channel, data, timeout, check):
    written = _write_now(channel, data)
    if written == len(data):
        return
    rest = memoryview(data)[written:]
    room = select.poll()  # select() knows no descriptors above 1023
    room.register(channel.fileno(), select.POLLOUT)
    deadline = time.monotonic() + timeout
    while rest:
        if room.poll(50):
            written = _write_now(channel, rest)
            if written:
                rest = rest[written:]
                deadline = time.monotonic() + timeout
                continue
        check()
        if time.monotonic() > deadline:
            raise TimeoutError


def _write_now(channel, data):
    """How much of it there was room for."""
    try:
        return channel.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
