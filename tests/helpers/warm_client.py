"""Stands for ``python ARGUMENTS`` while a fork of the warm server (``tests.helpers.warm_server``) runs that.

Started as ``python -IS warm_client.py SOCKET ARGUMENTS...`` with the arguments, environment, folder, three streams and
network namespace of the Python that it stands for. It hands all of these over, passes signals on, and ends as the fork
ends, by the same status or the same signal. When it is killed, so is the fork. Only the standard library, and of that
little: it starts in hundredths of a second. Where the server says no, or a descriptor beyond the three is to be
inherited, it becomes the Python that it stood for.
"""

import json
import os
import signal
import socket
import struct
import sys

NO, YES = b"n", b"y"  # nothing: the run is over
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def receive(connection: socket.socket, count: int) -> bytes:
    """``count`` bytes, or fewer where the other end has gone."""
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except ConnectionError:
            part = b""
        if not part:
            break
        data += part
    return data


def inherited() -> list[int]:
    """The descriptors above the three standard ones that are open in this process."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def umask() -> int:
    now = os.umask(0o22)
    os.umask(now)
    return now


def run(path: str, arguments: list[str]) -> int:
    """The status of the fork; does not come back where it ended by a signal, nor where a real Python takes over."""
    # what runs in the background of a shell ignores SIGINT, unless it says otherwise
    ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    if not inherited():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            request = {"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "umask": umask()}
            request |= {"ignored": ignored, "pid": os.getpid(), "network": os.readlink("/proc/self/ns/net")}
            body = json.dumps(request).encode()
            socket.send_fds(connection, [struct.pack("!I", len(body))], [0, 1, 2])
            for number in PASSED_ON:
                signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
            connection.sendall(body)
            answer = receive(connection, 1)
            if answer != NO:
                return _wait(connection)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def _wait(connection: socket.socket) -> int:
    # held here too, a pipe would stay open after the fork has closed its end
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    answer = receive(connection, 4)
    status = struct.unpack("!i", answer)[0] if len(answer) == 4 else -signal.SIGKILL  # the server has gone
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    return int(status)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
