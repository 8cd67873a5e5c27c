//! CPython with its standard library, warmed to its first empty read.

use crate::common;

use afresh_linux::{CallError, End};

const COUNTER: &str = r#"
import sys, json
seen = []
for line in sys.stdin:
    seen.append(line)
    d = json.loads(line)
    print(json.dumps({"n": len(d), "s": sum(d), "seen": len(seen)}), flush=True)
"#;

#[test]
fn a_script_that_counts_its_requests_counts_one() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", COUNTER).request("[1,2,3]\n");
    let Some(mut warm) = common::here(program.warm()).map(|warm| warm.instance()) else { return };
    for round in 0..300u64 {
        let list: Vec<u64> = (0..round % 40).collect();
        let answer = warm.call_pristine(format!("{list:?}\n").as_bytes()).unwrap();
        let expected = format!(
            "{{\"n\": {}, \"s\": {}, \"seen\": 2}}\n",
            list.len(),
            list.iter().sum::<u64>()
        );
        assert_eq!(String::from_utf8_lossy(&answer), expected);
        if round % 50 == 0 {
            warm.verify().unwrap();
        }
    }
    // An exception ends the program, not the next call.
    match warm.call_pristine(b"not json\n") {
        Err(CallError::Ended { end: End::Exit(1), messages, .. }) => {
            assert!(messages.contains("JSONDecodeError"), "{messages}")
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(warm.call_pristine(b"[4]\n").unwrap(), b"{\"n\": 1, \"s\": 4, \"seen\": 2}\n");
    warm.verify().unwrap();
    assert_eq!(warm.stats().processes, 1);
}

const LIBRARY: &str = r#"
import sys, os, select, tempfile, sqlite3, decimal, re, hashlib, zlib, random, datetime, pathlib, struct, collections, time, csv, io, pickle, shutil, glob, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def secret():
    if libc.syscall(447, 0) < 0: raise OSError(ctypes.get_errno(), "memfd_secret")
for line in sys.stdin:
    out = []
    with tempfile.TemporaryDirectory() as d:
        p = pathlib.Path(d) / "a.txt"
        p.write_text("hello\n" * 1000)
        os.rename(p, p.with_name("b.txt"))
        out.append(sorted(os.listdir(d)))
        out.append(p.with_name("b.txt").stat().st_size)
        shutil.copy(p.with_name("b.txt"), p)
        out.append(len(glob.glob(d + "/*.txt")))
        os.utime(p, (5, 6)); shutil.copy2(p, d + "/c"); os.link(d + "/c", d + "/l"); os.truncate(d + "/l", 3)
        s = os.stat(d + "/c"); f = os.open(d + "/c", os.O_RDWR); b = [bytearray(2), bytearray(9)]
        out.append((s.st_mtime > 6, s.st_atime, s.st_nlink, s.st_size, os.readv(f, b), os.pwritev(f, [b"x", b"yz"], 3)))
        os.posix_fallocate(f, 0, 10); out.append((os.fstat(f).st_size, os.statvfs(d).f_namemax, len(select.select([f], [], [f], 1)[0])))
        os.close(f)
        c = sqlite3.connect(d + "/x.db")
        c.execute("create table t (a, b)"); c.executemany("insert into t values (?, ?)", [(i, i * i) for i in range(100)]); c.commit()
        out.append(c.execute("select sum(b) from t").fetchone()[0]); c.close()
    out.append(os.path.exists(d))
    out.append(hashlib.sha256(zlib.compress(b"x" * 100000)).hexdigest()[:8])
    out.append(str(decimal.Decimal(2).sqrt())[:12])
    out.append(pickle.loads(pickle.dumps({"a": [1, 2]})))
    out.append(re.sub(r"(\w+)", r"<\1>", line.strip()))
    b = bytearray(20_000_000); b[::4096] = b"x" * len(b[::4096])
    out.append(len(b))
    t = time.monotonic(); time.sleep(0.002); out.append(time.monotonic() - t >= 0.002)
    out.append(datetime.datetime.now().year >= 2024)
    open("/tmp/left", "a").write("x"); out.append(os.path.getsize("/tmp/left"))
    os.environ["LEFT"] = str(len(os.environ.get("LEFT", "")) + 1); out.append(os.environ["LEFT"])
    os.chdir("/tmp"); out.append(len(os.urandom(16)))
    for kind in (secret, lambda: __import__("socket").socket(__import__("socket").AF_PACKET)):
        try: kind(); out.append("made")
        except OSError as e: out.append(e.errno)
    print(repr(out), flush=True)
"#;

#[test]
fn the_standard_library_works_and_leaves_nothing() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", LIBRARY);
    let Some(mut warm) = common::here(program.warm()).map(|warm| warm.instance()) else { return };
    let first = String::from_utf8(warm.call_pristine(b"a b\n").unwrap()).unwrap();
    let files = "[['b.txt'], 6000, 2, (True, 5.0, 2, 3, 3, 3), (10, 255, 1), 328350, False, ";
    assert!(first.starts_with(files), "{first}");
    assert!(first.contains("'<a> <b>', 20000000, True, True, 1, '1', 16, 38, 1]"), "{first}");
    for _ in 0..5 {
        assert_eq!(String::from_utf8(warm.call_pristine(b"a b\n").unwrap()).unwrap(), first);
        warm.verify().unwrap();
    }
    // Refused system calls are counted by number.
    assert!(warm.stats().unserved.contains_key(&MEMFD_SECRET), "{:?}", warm.stats().unserved);
}

/// The number of `splice`.
const MEMFD_SECRET: i64 = 447;
