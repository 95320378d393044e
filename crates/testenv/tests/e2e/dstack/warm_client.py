"""Runs the dstack client in forks of one process: loading its modules takes a core two seconds, its commands next to nothing.

usage: warm_client.py SOCKET

Reads a line for each command, `[DIRECTORY, [ARGUMENT...]]`, and answers with its exit code. The streams of the command are the
files `in`, `out` and `err` of the directory.
"""

import json
import os
import socket
import sys

from dstack._internal.cli.main import main


def serve(requests):
    """Returns the arguments of a command in each child, and `None` in the parent when all have ended."""
    for line in requests:
        directory, args = json.loads(line)
        child = os.fork()
        if child == 0:
            streams = (("in", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY))
            for number, (name, mode) in enumerate(streams):
                stream = os.open(os.path.join(directory, name), mode)
                os.dup2(stream, number)
                os.close(stream)
            return args
        _, status = os.waitpid(child, 0)
        requests.write(f"{os.waitstatus_to_exitcode(status)}\n")
        requests.flush()
    return None


connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
args = serve(connection.makefile("rw"))
if args is not None:
    connection.close()
    sys.argv = [os.path.join(sys.prefix, "bin", "dstack"), *args]
    sys.exit(main())
