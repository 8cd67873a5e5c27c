//! What a pristine call of CPython costs, beside a fork server and a new process, on one processor.
//!
//! `cargo run --release -p afresh-linux --example pristine_call [CALLS]` prints medians in microseconds.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use afresh_linux::Program;

const SERVE: &str = "import sys, json\nfor line in sys.stdin:\n    d = json.loads(line)\n    \
    sys.stdout.write(json.dumps({'n': len(d), 's': sum(d)}) + '\\n'); sys.stdout.flush()\n";
const FORK: &str = "import sys, json, os\nfor line in sys.stdin:\n    p = os.fork()\n    if p == 0:\n        d = json.loads(line)\n        \
    sys.stdout.write(json.dumps({'n': len(d), 's': sum(d)}) + '\\n'); sys.stdout.flush(); os._exit(0)\n    os.waitpid(p, 0)\n";
const REQUEST: &[u8] = b"[1, 2, 3, 4, 5]\n";
const ANSWER: &[u8] = b"{\"n\": 5, \"s\": 15}\n";

/// Median and 99th percentile in microseconds.
fn measure(calls: usize, mut call: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = (0..calls)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[calls / 2], times[calls * 99 / 100])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let calls = std::env::args().nth(1).map_or(Ok(5000), |n| n.parse())?;
    // Rivals inherit it: everything takes turns on one processor.
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &one)?;
    let ask = "import sys; print(sys.executable); print(sys.base_prefix)";
    let said = String::from_utf8(Command::new("python3").args(["-c", ask]).output()?.stdout)?;
    let mut lines = said.lines();
    let (python, prefix) = (lines.next().ok_or("no python3")?, lines.next().ok_or("no python3")?);

    let start = Instant::now();
    let program = Program::new(python).grant(prefix).arg("-c").arg(SERVE);
    let mut warm = (0..5).fold(program, |program, _| program.request(REQUEST)).warm()?;
    println!("warm after {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    for _ in 0..50 {
        assert_eq!(warm.call(REQUEST)?, ANSWER);
    }
    let (median, worst) = measure(calls, || assert_eq!(warm.call(REQUEST).unwrap(), ANSWER));
    warm.verify()?;
    let stats = warm.stats();
    println!(
        "afresh        median {median:8.1} us, p99 {worst:8.1}; {} pages copied back, image {} MiB, verified",
        stats.copied / 4096,
        stats.resident >> 20
    );

    for (name, script) in [("no reset", SERVE), ("fork server", FORK)] {
        let mut child = Command::new(python)
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut to = child.stdin.take().ok_or("no pipe")?;
        let mut from = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut ask = || {
            let mut line = Vec::new();
            to.write_all(REQUEST).unwrap();
            from.read_until(b'\n', &mut line).unwrap();
            assert_eq!(line, ANSWER);
        };
        (0..50).for_each(|_| ask());
        let (median, worst) = measure(calls.div_ceil(5), &mut ask);
        println!("{name:13} median {median:8.1} us, p99 {worst:8.1}");
        drop(to);
        child.wait()?;
    }
    let (median, worst) = measure(20, || {
        let mut child = Command::new(python)
            .args(["-c", SERVE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(REQUEST).unwrap();
        assert_eq!(child.wait_with_output().unwrap().stdout, ANSWER);
    });
    println!("new process   median {median:8.1} us, p99 {worst:8.1}");
    Ok(())
}
