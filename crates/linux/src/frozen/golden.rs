//! Versions 11 to 19 of the state, frozen: the kernel state of a guest that was written when a
//! version began is still read, and written byte for byte as then.
//!
//! The goldens in `tests/golden` are never written again. A change that makes these tests fail
//! needs a new version, a further golden, and code that still reads these. `AFRESH_WRITE_GOLDEN=1`
//! writes the golden of the present version if it is missing. The guest's memory is not part of it:
//! `crates/store` has goldens of pages.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::{ENGINE, ENGINES_BEFORE, Header, read_header};
use crate::program::Program;
use crate::sentry::PackedAdditions;

/// Waits for a line with files, pipes, a FIFO, processes, handlers, limits, a sleep, a lock, a
/// process in a user namespace, a process with an adjusted score, one of another user, files of
/// that user, one with another root directory, one whose thread reads a pipe that another thread
/// has closed, and one that it traces.
const COMMANDS: &str = "echo 300 >/proc/self/oom_score_adj; umask 027; trap 'echo usr1' USR1; trap '' USR2; ulimit -n 100; \
    mkdir /tmp/d; echo text > /tmp/d/f; ln -s f /tmp/d/l; mkfifo /tmp/p; exec 3< /tmp/d/f 4>> /tmp/d/f 5<> /tmp/p; \
    cd /tmp/d; rm f; echo own >own; chown 33:44 own . ; unshare -U sleep 100000 & \
    (setpriv --reuid 33 --regid 44 --groups 44,5 sleep 100000 | cat) & \
    chroot /usr /bin/sleep 100000 & \
    mkfifo /tmp/closed; python3 -c \"$CLOSES\" & read closed </tmp/closed; \
    while read line; do echo $line; done";

/// Traces a stopped child, and has a timer slack, a key, sealed memory, a pipe that sends signals,
/// and the status of a reaped child. Its second thread waits for a pipe that the first has closed.
const CLOSES: &str = "import ctypes, fcntl, mmap, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(result):
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result
call(libc.prctl(29, 12345, 0, 0, 0))
traced = os.fork()
if traced == 0:
    call(libc.ptrace(0, 0, 0, 0))
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100000)
assert os.WIFSTOPPED(os.waitpid(traced, 0)[1])
reaped = os.fork()
if reaped == 0:
    os._exit(3)
watched = os.pidfd_open(reaped)
os.waitpid(reaped, 0)
call(libc.syscall(248, b'user', b'name', b'secret', 6, -4))
sealed = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(sealed))
call(libc.syscall(462, ctypes.c_void_p(address), ctypes.c_size_t(4096), 0))
signals = os.pipe()
fcntl.fcntl(signals[0], fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(signals[0], 10, signal.SIGRTMIN)
reader, writer = os.pipe()
thread = threading.Thread(target=os.read, args=(reader, 1))
thread.start()
while open(f'/proc/self/task/{thread.native_id}/stat').read().split()[2] != 'S':
    time.sleep(0.01)
time.sleep(0.5)
os.close(reader)
os.write(os.open('/tmp/closed', os.O_WRONLY), b'closed\\n')
time.sleep(100000)";

fn golden(engine: &str) -> PathBuf {
    let version = engine.rsplit(' ').next().unwrap_or_default();
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/state-{version}.bin.gz"))
}

/// The content of the golden of a version.
pub(super) fn golden_bytes(engine: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(std::fs::File::open(golden(engine)).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Writes the golden, if it is missing and this is asked for.
fn write() {
    if golden(ENGINE).exists() || std::env::var_os("AFRESH_WRITE_GOLDEN").is_none() {
        return;
    }
    let granted = ["/bin", "/etc", "/lib", "/lib64", "/usr"];
    let program = Program::new("/bin/sh").arg("-c").arg(COMMANDS).request(b"warm\n").user(0, 0);
    let program = program.env("CLOSES", CLOSES).env("PATH", "/usr/sbin:/usr/bin:/bin");
    let program = granted.iter().fold(program, |program, path| program.grant(path));
    let frozen = program.warm().unwrap().freeze().unwrap();
    let file = std::fs::File::create(golden(ENGINE)).unwrap();
    let mut file = GzEncoder::new(file, Compression::best());
    file.write_all(&frozen.bytes().unwrap()).unwrap();
    file.finish().unwrap();
}

#[test]
fn the_state_of_version_11_is_read_and_written_as_it_was() {
    let golden = golden_bytes(ENGINES_BEFORE[0]);
    let (header, rest): (Header, _) = postcard::take_from_bytes(&golden).unwrap();
    assert!(rest.is_empty());
    check(&header, 5);
    assert!(postcard::to_allocvec(&header).unwrap() == golden, "the state has another form");
    let (_, additions) = read_header(&golden).unwrap();
    assert_eq!(
        postcard::to_allocvec(&additions),
        postcard::to_allocvec(&PackedAdditions::default())
    );
    refuse_parts(&golden, golden.len());
}

#[test]
fn the_state_of_version_12_is_read_and_written_as_it_was() {
    let golden = golden_bytes(ENGINES_BEFORE[1]);
    let (header, additions) = read_header(&golden).unwrap();
    check(&header, 5);
    assert_eq!(additions.tunables, Default::default());
    let bytes = postcard::to_allocvec(&header).unwrap();
    let header_len = bytes.len();
    assert!(header_len < golden.len(), "a state of version 12 has additions");
    let bytes = postcard::to_extend(&additions, bytes).unwrap();
    assert!(bytes == golden, "the state has another form");
    for length in header_len + 1..golden.len() {
        assert!(read_header(&golden[..length]).is_err(), "{length}");
    }
    refuse_parts(&golden, header_len);
}

#[test]
fn the_states_of_versions_13_to_19_are_read_and_written_as_they_were() {
    write();
    ENGINES_BEFORE[2..].iter().copied().chain([ENGINE]).for_each(check_whole);
}

fn check_whole(engine: &str) {
    let golden = golden_bytes(engine);
    let (header, additions) = read_header(&golden).unwrap();
    let [_, _, _, _, _, version_16, version_17, version_18] = ENGINES_BEFORE;
    let processes = match engine {
        ENGINE => 8,
        engine if engine == version_18 => 7,
        engine if engine == version_17 => 6,
        _ => 5,
    };
    check(&header, processes);
    assert_ne!(additions.tunables, Default::default());
    let bytes = postcard::to_allocvec(&header).unwrap();
    let header_len = bytes.len();
    let bytes = postcard::to_extend(&additions, bytes).unwrap();
    let additions_len = bytes.len();
    let mut bytes = postcard::to_extend(&additions.tunables, bytes).unwrap();
    let tunables_len = bytes.len();
    let has_users = [version_16, version_17, version_18, ENGINE].contains(&engine);
    if has_users {
        assert_ne!(additions.users, Default::default());
        bytes = postcard::to_extend(&additions.users, bytes).unwrap();
    } else {
        assert_eq!(additions.users, Default::default(), "the guest is user 1000");
    }
    let users_len = bytes.len();
    let has_roots = [version_17, version_18, ENGINE].contains(&engine);
    assert_eq!(additions.roots.is_empty(), !has_roots);
    if has_roots {
        bytes = postcard::to_extend(&additions.roots, bytes).unwrap();
    }
    let roots_len = bytes.len();
    let has_held = [version_18, ENGINE].contains(&engine);
    assert_eq!(additions.held.is_empty(), !has_held);
    if has_held {
        bytes = postcard::to_extend(&additions.held, bytes).unwrap();
    }
    let held_len = bytes.len();
    assert_eq!(additions.extensions == Default::default(), engine != ENGINE);
    if engine == ENGINE {
        bytes = postcard::to_extend(&additions.extensions, bytes).unwrap();
    }
    assert!(bytes == golden, "the state has another form");
    // An empty map behind version 16 or 17 would be valid.
    assert!(read_header(&[&golden[..], &[1]].concat()).is_err());
    for length in header_len + 1..golden.len() {
        let is_older =
            [additions_len, tunables_len, users_len, roots_len, held_len].contains(&length);
        assert_eq!(read_header(&golden[..length]).is_err(), !is_older, "{length}");
    }
    refuse_parts(&golden, header_len);
}

/// Checks a header of two shells, `cat` and sleeps.
fn check(header: &Header, processes: usize) {
    assert_eq!(header.parts.len(), processes);
    assert!(header.files > 0 && header.layers.is_none());
}

/// A state of another form does not pass for this one.
fn refuse_parts(golden: &[u8], header_len: usize) {
    for length in (0..header_len).step_by(header_len / 50) {
        assert!(postcard::from_bytes::<Header>(&golden[..length]).is_err(), "{length}");
    }
}
