"""Programs that try to reach the network, the machine's files or their parent's."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from rollout_pool.sandbox import seccomp
from rollout_pool.sandbox.run import run_program
from rollout_pool.sandbox.view import mounts_below

LIBC = ctypes.CDLL(None, use_errno=True)
IPC_RMID, IPC_CREAT, IPC_NOWAIT = 0, 0o1000, 0o4000

# Network ------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    """A service on this machine; the list tells who came."""
    came: list[str] = []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    over = threading.Event()

    def serve():
        while not over.is_set():
            try:
                connection, address = server.accept()
                came.append(str(address))
                connection.close()
            except TimeoutError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1], came
    over.set()
    thread.join()
    server.close()


CONNECTS = [
    "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
    "import urllib.request as u; u.urlopen('http://127.0.0.1:PORT/')",
    "import socket; s = socket.socket(); s.connect(('127.0.0.1', PORT))",
    "import socket; s = socket.socket(fileno=0); s.connect(('127.0.0.1', PORT))",
    "import socket; socket.getaddrinfo('example.com', 80)",
    "import socket; socket.socket(socket.AF_UNIX); socket.create_server(('', 0))",
    "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'', ('1.1.1.1', 53))",
]


async def test_network_is_unreachable(attempt, listener):
    port, came = listener
    result = await attempt([code.replace("PORT", str(port)) for code in CONNECTS])
    assert result.reason == "network" and came == []


async def test_network_attempt_is_reported_even_if_the_program_continues(run):
    code = (
        "import socket\ntry: socket.create_connection(('1.1.1.1', 53), 1)\nexcept OSError: print(5)"
    )
    result = await run(code)
    assert (result.stdout, result.reason, result.tried) == ("5\n", None, ("network",))


@pytest.fixture
def mailbox(secret):
    """A datagram socket such as a machine's log has, which everybody may send to."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = secret.parent / "log"
    server.bind(str(path))
    path.chmod(0o666)
    server.setblocking(False)
    yield server, path
    server.close()


async def test_socket_pair_cannot_send_to_other_sockets(attempt, mailbox):
    server, path = mailbox
    code = """
import socket
one, other = socket.socketpair(socket.AF_UNIX, socket.{kind})
one.sendto(b"forged", "{path}")
"""
    kinds = ("SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_RAW")
    await attempt([code.format(kind=kind, path=path) for kind in kinds])
    with pytest.raises(BlockingIOError):
        server.recv(100)


CALLS_ON_A_SOCKET = ("bind", "listen", "accept", "accept4", "connect", "sendmsg", "sendmmsg")


async def test_sockets_that_a_program_has_can_only_stream(run):
    column = ("x86_64", "aarch64").index(os.uname().machine)
    numbers = {name: seccomp.NETWORK[name][column] for name in CALLS_ON_A_SOCKET}
    code = f"""
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
one, other = socket.socketpair()
other.send(b"x")
message = ctypes.create_string_buffer(4096)
for name, number in {numbers}.items():
    for descriptor in (one.fileno(), 0):  # the latter is a socket of the parent's
        result = libc.syscall(number, descriptor, message, 1, 0)
        if (result, ctypes.get_errno()) != (-1, errno.EPERM):
            print(name, descriptor, result, ctypes.get_errno())
print(libc.sendto(one.fileno(), message, 1, 0, message, 16), ctypes.get_errno() == errno.EPERM)
print(one.send(b"y"), other.recv(9), one.recv(9))
"""
    result = await run(code)
    assert (result.stdout, result.stderr) == ("-1 True\n1 b'y' b'x'\n", "")


# Files and environment ----------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("the secret")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() != "root" or str(folder).startswith("/tmp/pytest"):
            folder.chmod(0o755)
    path.chmod(0o644)
    return path


def naming(secret, code):
    return code.replace("SECRET", str(secret)).replace("FOLDER", str(secret.parent))


READS = [
    "print(open('SECRET').read())",
    "import os; os.symlink('SECRET', '/tmp/soft'); print(open('/tmp/soft').read())",
    "import os; os.link('SECRET', '/tmp/hard'); print(open('/tmp/hard').read())",
    "import os; print(os.listdir('FOLDER'))",
    "print(open('/proc/self/root/SECRET').read())",
    "print(open('/tmp/../SECRET').read())",
    "import os; os.chroot('/tmp'); print(open('/../SECRET').read())",
    "import shutil; shutil.copy('SECRET', '/tmp/copy'); print(open('/tmp/copy').read())",
    "open('/etc/passwd')",
    f"open('{Path(__file__)}')",
    "import pytest",
    "import os; d = os.open('/', os.O_PATH); os.open('etc/shadow', 0, dir_fd=d)",
]


async def test_files_of_the_machine_cannot_be_read(attempt, secret):
    result = await attempt([naming(secret, code) for code in READS])
    assert result.reason == "files" and "the secret" not in result.stdout


WRITES = [
    "open('FOLDER/written', 'w')",
    "open('SECRET', 'a').write('more')",
    "import os; os.remove('SECRET')",
    "import os; os.rename('SECRET', 'FOLDER/written')",
    "import os; os.mkdir('FOLDER/written')",
    "import os; os.chmod('SECRET', 0o777); open('SECRET')",
    "import os; os.truncate('SECRET', 0)",
    "import os; os.symlink('FOLDER', '/tmp/link'); open('/tmp/link/written', 'w')",
    "import os; open(os.__file__, 'a')",
    "import json; open(json.__file__ + '.written', 'w')",
    "open('/written', 'w')",
    "open('/dev/shm/written', 'w')",
    "open('/usr/lib/written', 'w')",
]


async def test_files_of_the_machine_cannot_be_written(attempt, secret):
    mode = secret.stat().st_mode
    result = await attempt([naming(secret, code) for code in WRITES])
    assert result.reason == "files"
    assert {*result.stdout.split()} <= {"FileNotFoundError", "OSError", "PermissionError"}
    assert secret.read_text() == "the secret" and secret.stat().st_mode == mode
    assert [path.name for path in secret.parent.iterdir()] == ["secret.txt"]
    assert not os.path.exists("/written") and not os.path.exists("/usr/lib/written")


async def test_folders_of_the_machine_cannot_be_watched(run, secret):
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
watcher = libc.inotify_init1(0)
print(libc.inotify_add_watch(watcher, b"FOLDER", 0xFFF) >= 0)
"""
    assert (await run(naming(secret, code))).stdout == "False\n"


async def test_files_cannot_be_leased(run):
    """Opening a leased file waits for the program, and its Python is the machine's."""
    code = "import fcntl, os\nfcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)"
    assert "PermissionError: [Errno 1]" in (await run(code)).stderr


async def test_dev_null_can_be_written(run):
    code = """
import contextlib, os
with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
    print("unseen")
open("/dev/null", "ab").write(b"x")
print(open("/dev/null").read() == "")
"""
    result = await run(code)
    assert (result.stdout, result.stderr) == ("True\n", "")


async def test_file_cannot_be_huge():
    code = "with open('/tmp/big', 'wb') as f:\n    while True: f.write(bytes(1_000_000))"
    result = await run_program(code)
    assert (result.exit_code, result.reason) == (1, "files")
    assert "File too large" in result.stderr


async def test_many_files_cannot_be_huge_together():
    code = """
for i in range(1000):
    with open(f'/tmp/{i}', 'wb') as f:
        f.write(bytes(10_000_000))
"""
    result = await run_program(code)
    assert (result.exit_code, result.reason) == (1, "files")
    assert "No space left" in result.stderr


@pytest.fixture
def shared():
    """A segment of memory and a queue of the machine that everybody may use."""
    memory = LIBC.shmget(0, 4096, IPC_CREAT | 0o666)
    queue = LIBC.msgget(0, IPC_CREAT | 0o666)
    assert memory >= 0 and queue >= 0
    yield memory, queue
    LIBC.shmctl(memory, IPC_RMID, None)
    LIBC.msgctl(queue, IPC_RMID, None)


async def test_memory_and_queues_of_others_cannot_be_reached(run, shared):
    memory, queue = shared
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
print(libc.shmat({memory}, None, 0) == 2**64 - 1)
message = ctypes.create_string_buffer(b"\\1" + bytes(63))
print(libc.msgsnd({queue}, message, 8, 0), libc.msgctl({queue}, 0, None))
print(libc.shmctl({memory}, 0, None))
"""
    assert (await run(code)).stdout == "True\n-1 -1\n-1\n"
    assert LIBC.msgrcv(queue, ctypes.create_string_buffer(64), 8, 0, IPC_NOWAIT) == -1
    assert ctypes.get_errno() == errno.ENOMSG


async def test_environment_is_empty(run):
    name = "LEASH_TEST_SECRET"
    os.environ[name] = "the secret"
    try:
        code = f"""
import ctypes, os
print(sorted(set(os.environ) - {{"LC_CTYPE"}}))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"{name}"))
for place in ("self", "1", "{os.getpid()}", str(os.getppid()), "thread-self"):
    for what in ("environ", "cmdline", "mem", "maps"):
        try:
            print(open(f"/proc/{{place}}/{{what}}", "rb").read(100))
        except OSError:
            pass
"""
        result = await run(code)
    finally:
        del os.environ[name]
    assert result.stdout == "[]\nNone\n", result


async def test_descriptors_of_the_parent_are_closed(run):
    code = """
import os
found = []
for number in range(3, 4096):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(len(found))
"""
    with open(__file__) as file, socket.create_server(("127.0.0.1", 0)) as server:
        for inherited in (file.fileno(), server.fileno()):  # as those of Ray's native code are
            os.set_inheritable(inherited, True)
        result = await run(code)
        tested = await run("", statements=code)
    assert result.stdout == "1\n"  # where it says what it ran into
    assert tested.stdout == "2\n"  # the pipes to the program


def test_mounts_that_the_root_hides_are_not_taken_for_its_own() -> None:
    mountinfo = """\
20 1 8:1 / / rw - ext4 /dev/sda rw
31 20 0:40 / /tmp rw - tmpfs tmpfs rw
40 31 0:41 / /tmp/of\\040others rw - tmpfs tmpfs rw
52 31 0:50 / /tmp rw - tmpfs tmpfs rw
53 52 8:1 /usr/lib /tmp/usr/lib ro - ext4 /dev/sda rw
54 53 0:51 / /tmp/usr/lib/a\\040b rw - tmpfs tmpfs rw
55 20 0:52 / /tmpfs rw - tmpfs tmpfs rw
""".splitlines()
    assert mounts_below("/tmp", mountinfo) == ["/tmp/usr/lib", "/tmp/usr/lib/a b"]
