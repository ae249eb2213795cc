"""Run the command line for many callers in forks of one process, since importing torch takes seconds.

The argument is the path of a socket. Callers send their working folder, environment, arguments and open files, and get
the exit code of the command.
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
if sys.argv[1:2] == ["serve"]:  # is stopped by a signal, so it needs a separate process
    os.execv(sys.executable, [sys.executable, "-m", "probprompt", *sys.argv[1:]])
if program == "python":
    if sys.argv[1:3] != ["-m", "reproduction"]:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    program, sys.argv = "reproduction", sys.argv[2:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    request = {{"arguments": [program, *sys.argv[1:]], "folder": os.getcwd(), "environment": dict(os.environ)}}
    message = json.dumps(request).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(message)
    sys.exit(int(server.recv(16) or b"70"))
"""


def _serve(connection: socket.socket) -> None:
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += connection.recv(1 << 16)
    request = json.loads(message)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["arguments"]
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
