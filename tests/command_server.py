"""Runs the command line for many callers: importing torch takes seconds, so it is done once and then forked.

Started with the path of a socket, it answers each caller's working folder, environment, arguments and open files
with the exit code of the real command.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

CLIENT = """#!{python}
import json, os, socket, sys
program = os.path.basename(sys.argv[0])
if sys.argv[1:2] == ["serve"]:  # is stopped by a signal, and so a process of its own
    os.execv(sys.executable, [sys.executable, "-m", "probprompt", *sys.argv[1:]])
if program == "python":
    if sys.argv[1:3] != ["-m", "reproduction"]:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    program, sys.argv = "reproduction", sys.argv[2:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    asked = {{"arguments": [program, *sys.argv[1:]], "folder": os.getcwd(), "environment": dict(os.environ)}}
    told = json.dumps(asked).encode()
    socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(told)
    sys.exit(int(server.recv(16) or b"70"))
"""


def _serve(connection: socket.socket) -> None:
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    told = b""
    while len(told) < int.from_bytes(head, "big"):
        told += connection.recv(1 << 16)
    asked = json.loads(told)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = asked["arguments"]
        code = 70  # of an exception that the program does not handle
        try:
            PROGRAMS[sys.argv[0]]()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for file in files:
        os.close(file)
    _, status = os.waitpid(child, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())


if __name__ == "__main__":
    import torch

    sys.path.insert(0, str(Path(__file__).parent.parent))
    import probprompt.api
    import probprompt.classifier
    import probprompt.cli
    import probprompt.cli.grid_screen
    import probprompt.data.verify
    import probprompt.report.pages
    import probprompt.runs.leak_audit
    import reproduction.__main__

    PROGRAMS = {"probprompt": probprompt.cli.main, "reproduction": reproduction.__main__.main}
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        for client in (path.parent / "probprompt", path.parent / "python"):
            client.write_text(CLIENT.format(python=sys.executable, path=str(path)), encoding="utf-8")
            client.chmod(0o755)
        (path.parent / "ready").touch()
        while True:
            accepted, _ = listener.accept()
            with accepted:
                _serve(accepted)
