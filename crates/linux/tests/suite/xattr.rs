//! Extended attributes and access control lists: their calls and errors, and that they are part of
//! every state.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const ATTRIBUTES: &str = r#"
import errno, os, shutil, struct, sys
ACCESS, DEFAULT, NONE = "system.posix_acl_access", "system.posix_acl_default", 0xffffffff

def fails(number, work, *args, **more):
    try: work(*args, **more)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

def acl(*entries): return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)

def values():
    path = "/tmp/f"; open(path, "w").close(); os.symlink(path, "/tmp/l")
    assert os.listxattr(path) == [] and os.listxattr("/proc/self") == []; fails(errno.ENODATA, os.getxattr, path, "user.a")
    os.setxattr(path, "user.a", b"one"); os.setxattr("/tmp/l", "user.b", b""); os.setxattr(path, "user.a", b"two", os.XATTR_REPLACE)
    assert sorted(os.listxattr(path)) == ["user.a", "user.b"] and os.getxattr("/tmp/l", "user.a") == b"two"
    fails(errno.EEXIST, os.setxattr, path, "user.a", b"", os.XATTR_CREATE); fails(errno.ENODATA, os.setxattr, path, "user.c", b"", os.XATTR_REPLACE)
    with open(path) as file:
        assert os.getxattr(file.fileno(), "user.a") == b"two"; os.removexattr(file.fileno(), "user.b")
    fd = os.open(path, os.O_PATH); fails(errno.EBADF, os.getxattr, fd, "user.a"); os.close(fd)
    # Names and values have limits, and so do the files of a guest.
    fails(errno.E2BIG, os.setxattr, path, "user.a", b"x" * 65537); os.setxattr(path, "user.a", b"x" * 65536); assert len(os.getxattr(path, "user.a")) == 65536
    os.setxattr(path, "user." + "n" * 250, b""); fails(errno.ERANGE, os.setxattr, path, "user." + "n" * 251, b"")
    count = 0
    try:
        for count in range(10_000): os.setxattr(path, f"user.{count}", b"x" * 65536)
    except OSError as e: assert e.errno == errno.ENOSPC, e
    assert 5 < count < 9000, count
    for name in os.listxattr(path): os.removexattr(path, name)
    # Other kinds, and files that have none.
    for name, number in (("trusted.a", errno.EPERM), ("security.a", errno.EPERM), ("other.a", errno.EOPNOTSUPP), ("user.", errno.EINVAL), ("system.a", errno.EOPNOTSUPP)): fails(number, os.setxattr, path, name, b"")
    fails(errno.ENODATA, os.getxattr, path, "trusted.a"); fails(errno.EPERM, os.setxattr, "/dev/null", "user.a", b""); fails(errno.EPERM, os.setxattr, "/tmp/l", "user.a", b"", follow_symlinks=False)
    os.chmod(path, 0o400); fails(errno.EACCES, os.setxattr, path, "user.a", b""); os.chmod(path, 0o200); os.setxattr(path, "user.a", b"1"); fails(errno.EACCES, os.getxattr, path, "user.a"); os.chmod(path, 0o600)
    # A copy keeps them, and the last name takes them along.
    shutil.copy2(path, "/tmp/g"); assert os.getxattr("/tmp/g", "user.a") == b"1"
    os.link("/tmp/g", "/tmp/h"); os.unlink("/tmp/g"); assert os.getxattr("/tmp/h", "user.a") == b"1"
    for name in ("f", "h", "l"): os.unlink("/tmp/" + name)

def lists():
    os.umask(0o022); os.mkdir("/tmp/d"); path = "/tmp/d/f"; open(path, "w").close()
    full = acl((1, 6, NONE), (2, 4, 1000), (4, 4, NONE), (0x10, 7, NONE), (0x20, 1, NONE))
    os.setxattr(path, ACCESS, full); assert os.getxattr(path, ACCESS) == full and os.stat(path).st_mode & 0o777 == 0o671
    os.chmod(path, 0o450); assert os.getxattr(path, ACCESS) == acl((1, 4, NONE), (2, 4, 1000), (4, 4, NONE), (0x10, 5, NONE), (0x20, 0, NONE))
    os.setxattr(path, ACCESS, acl((1, 7, NONE), (4, 5, NONE), (0x20, 4, NONE))); assert os.stat(path).st_mode & 0o777 == 0o754; fails(errno.ENODATA, os.getxattr, path, ACCESS)
    os.removexattr(path, ACCESS); fails(errno.EACCES, os.setxattr, path, DEFAULT, full); fails(errno.EINVAL, os.setxattr, path, ACCESS, full[:-1]); fails(errno.EINVAL, os.setxattr, path, ACCESS, acl((1, 7, NONE)))
    # A default list is inherited, and replaces the mask of the process.
    default = acl((1, 7, NONE), (2, 5, 1000), (4, 5, NONE), (0x10, 7, NONE), (0x20, 5, NONE)); os.setxattr("/tmp/d", DEFAULT, default)
    os.close(os.open("/tmp/d/new", os.O_CREAT | os.O_WRONLY, 0o666)); os.mkdir("/tmp/d/sub", 0o777)
    assert os.stat("/tmp/d/new").st_mode & 0o777 == 0o664 and os.getxattr("/tmp/d/new", ACCESS) == acl((1, 6, NONE), (2, 5, 1000), (4, 5, NONE), (0x10, 6, NONE), (0x20, 4, NONE))
    assert os.getxattr("/tmp/d/sub", DEFAULT) == default and os.stat("/tmp/d/sub").st_mode & 0o777 == 0o775; fails(errno.ENODATA, os.getxattr, "/tmp/d/new", DEFAULT)
    shutil.rmtree("/tmp/d")

for line in sys.stdin:
    match line.strip():
        case "all": values(); lists(); print("done", flush=True)
        case "hold": open("/tmp/kept", "w").close(); os.setxattr("/tmp/kept", "user.kept", b"held"); print("held", flush=True)
        case "look":
            try: print(os.getxattr("/tmp/kept", "user.kept").decode(), flush=True)
            except OSError: print("none", flush=True)
"#;

#[test]
fn attributes_have_the_limits_and_errors_of_linux_and_are_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", ATTRIBUTES);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "held", "none"]);
}
