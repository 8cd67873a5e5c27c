//! Permission bits: those of the owner hold for the guest's one user, and changed ones are part of
//! every state.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const BITS: &str = r##"
import errno, os, socket, subprocess, sys

def denied(work, *args, **more):
    try: work(*args, **more)
    except OSError as e: assert e.errno == errno.EACCES, e
    else: assert False, "it works"

def write(path, text=""):
    with open(path, "w") as file: file.write(text)

def all():
    os.umask(0); os.makedirs("/tmp/d/e"); write("/tmp/d/f", "text"); write("/tmp/d/e/g"); os.chdir("/tmp")
    # Open files stay open; a new file may be opened in every mode.
    kept = open("d/f"); fd = os.open("d/new", os.O_RDWR | os.O_CREAT, 0); os.write(fd, b"x"); os.close(fd)
    denied(open, "d/new"); denied(os.open, "d/new", os.O_WRONLY | os.O_CREAT)
    # Only the owner's bits count, for all files are the user's.
    for mode, reads, writes in ((0o400, 1, 0), (0o200, 0, 1), (0o077, 0, 0), (0o600, 1, 1)):
        os.chmod("d/f", mode)
        assert (os.access("d/f", os.R_OK), os.access("d/f", os.W_OK), os.access("d/f", os.F_OK)) == (reads, writes, True)
        for may, flags in ((reads, os.O_RDONLY), (writes, os.O_WRONLY), (reads and writes, os.O_RDWR), (reads and writes, os.O_RDONLY | os.O_TRUNC)):
            if may: os.close(os.open("d/f", flags))
            else: denied(os.open, "d/f", flags), denied(os.open, f"/proc/self/fd/{kept.fileno()}", flags)
        if writes: os.truncate("d/f", 4)
        else: denied(os.truncate, "d/f", 4)
        os.close(os.open("d/f", os.O_PATH)); os.utime("d/f"); os.stat("d/f")
    assert kept.read() == "\0\0\0\0"
    # A directory that may not be changed.
    os.chmod("d", 0o555)
    for work, *args in ((write, "d/x"), (os.mkdir, "d/x"), (os.mkfifo, "d/x"), (os.symlink, "x", "d/x"), (os.link, "d/f", "d/x"), (os.unlink, "d/f"), (os.rmdir, "d/e"),
        (os.rename, "d/f", "x"), (os.rename, "d/f", "d/x"), (os.open, "d", os.O_TMPFILE | os.O_RDWR), (socket.socket(socket.AF_UNIX).bind, "d/x")):
        denied(work, *args)
    try: os.mkdir("d/e")
    except FileExistsError: pass
    try: os.unlink("d/none")
    except FileNotFoundError: pass
    write("d/f", "as before"); assert os.listdir("d") and os.path.isdir("d/e")
    # One that may not be searched, and one that may not be listed.
    os.chmod("d", 0o666); assert sorted(os.listdir("d")) == ["e", "f", "new"]
    for work, *args in ((open, "d/f"), (os.stat, "d/f"), (os.stat, "d/none"), (os.chdir, "d"), (os.stat, "d/e/g"), (os.readlink, "d/f"), (os.chmod, "d/f", 0), (os.stat, "d/..")): denied(work, *args)
    fd = os.open("d", os.O_RDONLY); denied(os.fchdir, fd); denied(os.stat, "f", dir_fd=fd); os.close(fd)
    os.chmod("d", 0o100); denied(os.listdir, "d"); assert open("d/f").read() == "as before"
    os.chmod("d", 0o777); os.chmod("d/e", 0o555); os.rename("d/e", "d/e2"); denied(os.rename, "d/e2", "e"); os.chmod("d/e2", 0o755); os.rename("d/e2", "d/e")
    # Programs.
    write("d/run", "#!/bin/sh\necho ran\n")
    for mode, runs in ((0o644, False), (0o655, False), (0o755, True)):
        os.chmod("d/run", mode); assert os.access("d/run", os.X_OK) == runs
        if runs: assert subprocess.run(["/tmp/d/run"], capture_output=True).stdout == b"ran\n"
        else: denied(subprocess.run, ["/tmp/d/run"])
    os.chmod("d", 0o666); denied(subprocess.run, ["/tmp/d/run"]); os.chmod("d", 0o777)
    # Connecting to a socket needs write permission on its name.
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("d/s"); server.listen(); os.chmod("d/s", 0o577); denied(client.connect, "d/s"); os.chmod("d/s", 0o700); client.connect("d/s")
    # It may be given to its owner, and to no other user; its bits stay.
    os.chown("d/run", os.getuid(), -1); os.chmod("d/run", 0o6755); assert os.stat("d/run").st_mode & 0o7777 == 0o6755
    try: os.chown("d/run", 0, 0)
    except PermissionError as e: assert e.errno == errno.EPERM
    out = subprocess.run("rm -rf /tmp/d", shell=True, capture_output=True)
    assert not os.path.exists("/tmp/d"), out

for line in sys.stdin:
    match line.strip():
        case "all": all(); print("done", flush=True)
        case "hold": write("/tmp/f", "secret"); os.chmod("/tmp/f", 0o200); print("held", flush=True)
        case "look":
            try: print(open("/tmp/f").read(), flush=True)
            except OSError as e: print(errno.errorcode[e.errno], flush=True)
"##;

#[test]
fn the_owners_bits_hold_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", BITS).env("PATH", "/usr/bin:/bin");
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "EACCES", "ENOENT"]);
}
