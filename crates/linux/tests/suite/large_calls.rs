//! Single calls of a guest that are large: their memory in this process is bounded, and they end at
//! the time limit.

use std::time::Duration;

use afresh_linux::{End, HostStreams, Instance, Program, RunControl};
use afresh_sys::run_isolated;

use crate::common;
use crate::common::states::ask;

const LIMIT: Duration = Duration::from_secs(100);

const SCRIPT: &str = r#"
import ctypes, errno, mmap, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p
def error(work, *args):
    try: return work(*args)
    except OSError as e: return errno.errorcode[e.errno]
def nested():
    # Below it, a path has 255,000 bytes.
    os.chdir("/tmp"); name = "d" * 255
    for _ in range(1000): os.mkdir(name); os.chdir(name)
    with open("f", "wb") as file: file.write(bytes(16384))
def maps():
    fd = os.open("f", os.O_RDONLY)
    for n in range(2000): libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, n % 2 * 8192)
    text = open("/proc/self/maps").read()
    # A path that no call takes is left out.
    return [text.count("r--p 00000000") >= 1000, text.endswith("\n"), "d" * 255 in text]
def run():
    shutil.copy("/bin/true", "t")
    return error(os.execv, "./t", ["t"])
def links():
    """Links of /proc to paths that no call takes."""
    names = [f"/proc/self/fd/{os.open('f', os.O_RDONLY)}", "/proc/self/cwd"]
    program = f"/proc/self/fd/{os.open('t', os.O_RDONLY)}"
    opened = [error(os.open, name, os.O_NOFOLLOW) for name in names]
    targets = [error(os.readlink, name) for name in names]
    return targets + opened + [error(os.execv, program, ["t"])]
def full():
    with open("/tmp/fill", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
        file.truncate(file.tell() // 4096 * 4096 - 4096)
    answers = [error(lambda: open(f"/proc/self/{name}").read()[-1:]) for name in ("smaps", "limits")]
    os.unlink("/tmp/fill")
    return answers + [open("/proc/self/smaps").read()[-1:]]
def sparse():
    with open("/tmp/sparse", "wb+") as file:
        file.write(b"first"); file.truncate(600 << 20)
        os.pwrite(file.fileno(), b"middle", 300 << 20); os.pwrite(file.fileno(), b"last", (600 << 20) - 4)
        view = mmap.mmap(file.fileno(), 600 << 20, mmap.MAP_PRIVATE)
    view[1:2] = b"I"
    parts = [view[:6], view[1 << 20:(1 << 20) + 2], view[300 << 20:(300 << 20) + 6], view[-5:]]
    view.close(); os.unlink("/tmp/sparse")
    return parts
def many(): return error(os.execv, "/nonexistent", ["x"] + [""] * 199999)
def moved():
    """Memory that moves in several parts keeps its bytes."""
    size, anonymous = 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    at = libc.mmap(None, size, 3, anonymous, -1, 0)
    for offset in range(0, size, 1 << 20): ctypes.memset(at + offset, 1 + (offset >> 20), 1)
    to = libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(size), ctypes.c_size_t(size), 3, ctypes.c_void_p(0x100000000000))
    found = [ctypes.string_at(to + offset, 2) for offset in range(0, size, 1 << 20)]
    libc.munmap(ctypes.c_void_p(to), ctypes.c_size_t(size))
    return found == [bytes([1 + n, 0]) for n in range(40)]
def echo(): return "echo"
for line in sys.stdin:
    print(globals()[line.strip()](), flush=True)
"#;

fn instance(shape: impl Fn(Program) -> Program) -> Option<Instance> {
    let program = common::python()?.arg("/app.py").file("/app.py", SCRIPT).request("echo\n");
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    Some(common::here(shape(program).warm())?.instance())
}

/// The bytes of memory of this process at most, since `work` began, beyond those before it.
fn peak_growth(work: impl FnOnce()) -> u64 {
    let status = |field: &str| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap().to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    // The peak counts from now on.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    work();
    status("VmHWM:").saturating_sub(before)
}

#[test]
fn mappings_of_a_file_in_a_deep_directory_take_little_memory_to_list() {
    run_isolated(
        "large_calls::mappings_of_a_file_in_a_deep_directory_take_little_memory_to_list",
        || {
            let Some(mut instance) = instance(|program| program) else { return };
            assert_eq!(ask(&mut instance, "nested"), "None");
            // The text would have 500 MB with the path in each line.
            let growth = peak_growth(|| {
                assert_eq!(ask(&mut instance, "maps"), "[True, True, False]");
            });
            assert!(growth < 64 << 20, "{growth}");
            assert_eq!(ask(&mut instance, "run"), "ENAMETOOLONG");
            let links = "['ENAMETOOLONG', 'ENAMETOOLONG', 'ELOOP', 'ELOOP', 'ENAMETOOLONG']";
            assert_eq!(ask(&mut instance, "links"), links);
        },
    );
}

#[test]
fn a_file_of_proc_is_whole_or_fails_where_storage_is_full() {
    let Some(mut instance) = instance(|program| program.storage_limit(32 << 20)) else { return };
    assert_eq!(ask(&mut instance, "full"), "['ENOMEM', '\\n', '\\n']");
}

#[test]
fn a_private_mapping_of_a_sparse_file_takes_no_memory_for_holes() {
    run_isolated(
        "large_calls::a_private_mapping_of_a_sparse_file_takes_no_memory_for_holes",
        || {
            let shape = |program: Program| program.memory_limit(1 << 30);
            let Some(mut instance) = instance(shape) else { return };
            let growth = peak_growth(|| {
                let parts = r"[b'fIrst\x00', b'\x00\x00', b'middle', b'\x00last']";
                assert_eq!(ask(&mut instance, "sparse"), parts);
            });
            assert!(growth < 64 << 20, "{growth}");
            assert_eq!(ask(&mut instance, "many"), "ENOENT");
        },
    );
}

#[test]
fn memory_that_moves_keeps_its_bytes() {
    let Some(mut instance) = instance(|program| program.memory_limit(256 << 20)) else { return };
    for _ in 0..2 {
        assert_eq!(ask(&mut instance, "moved"), "True");
        instance.reset();
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "echo"), "echo");
    }
}

/// Stops the run at its first output.
struct Stop(RunControl);

impl std::io::Write for Stop {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.stop();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a script that is stopped at its first output, in the middle of a call, and asks the saved
/// state for the result of that.
fn ask_stopped(script: &str) -> Option<String> {
    let program = common::python()?.arg("-c").arg(script);
    let program = program.storage_limit(1 << 30).time_limit(LIMIT).start_limit(LIMIT);
    let control = RunControl::new().unwrap();
    let streams = HostStreams::default().output(Stop(control.clone())).control(control);
    let run = common::here(program.run_to_end(streams.keep_state()))?;
    assert_eq!(run.end, End::Stopped);
    let mut instance = run.state.unwrap().instance();
    Some(ask(&mut instance, "written"))
}

#[test]
fn a_large_write_to_a_file_that_is_stopped_continues_in_the_saved_state() {
    let script = "import os, sys, threading, time
piece, file = bytes([1]) * (1 << 20), os.open('/tmp/f', os.O_CREAT | os.O_WRONLY)
# A state is kept where a thread waits for input.
thread = threading.Thread(target=sys.stdin.readline)
thread.start(); time.sleep(0.1)
os.write(1, b'begun')
written = os.writev(file, [piece] * 1000)
thread.join()
print(written, os.stat('/tmp/f').st_size, flush=True)
sys.stdin.readline()";
    let Some(answer) = ask_stopped(script) else { return };
    // The state has the output before.
    assert_eq!(answer, "begun1048576000 1048576000");
}

#[test]
fn a_large_asynchronous_write_that_is_stopped_continues_in_the_saved_state() {
    let script = "import ctypes, os, struct, sys, threading, time
libc, PWRITEV = ctypes.CDLL(None), 8
setup, submit, events = (206, 209, 208) if os.uname().machine == 'x86_64' else (0, 2, 4)
piece, file = ctypes.create_string_buffer(1 << 20), os.open('/tmp/f', os.O_CREAT | os.O_WRONLY)
vector = (ctypes.c_uint64 * 2000)(*[ctypes.addressof(piece), 1 << 20] * 1000)
def operation(count):
    fields = (7, 0, 0, PWRITEV, 0, file, ctypes.addressof(vector), count, 0, 0, 0, 0)
    return ctypes.create_string_buffer(struct.pack('<QIIHhIQQqQII', *fields), 64)
long, short = operation(1000), operation(1)
def submitted(*list):
    list = (ctypes.c_void_p * len(list))(*map(ctypes.addressof, list))
    return libc.syscall(submit, context, len(list), list)
context = ctypes.c_ulong()
libc.syscall(setup, 8, ctypes.byref(context))
thread = threading.Thread(target=sys.stdin.readline)
thread.start(); time.sleep(0.1)
os.write(1, b'begun ')
first, result = submitted(long, short), ctypes.create_string_buffer(32)
thread.join()
count = libc.syscall(events, context, 1, 1, result, None)
print(first, count, struct.unpack('<QQqq', result)[2], os.stat('/tmp/f').st_size, end=' ')
# A long one behind another is for the next call.
print(submitted(short, long), submitted(short, short), flush=True)
sys.stdin.readline()";
    let Some(answer) = ask_stopped(script) else { return };
    assert_eq!(answer, "begun 1 1 1048576000 1048576000 1 2");
}
