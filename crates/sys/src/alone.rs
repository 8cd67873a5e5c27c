//! A test in a process of its own: for what concerns the whole process (a fork, a filter of system calls, a
//! limit), and must not meet other tests.
//!
//! What it promises: the test ran, alone, and passed; one that hangs is ended. For the tests of this workspace
//! only.

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Set in the process of its own.
const CHILD: &str = "AFRESH_TEST_ALONE";
/// A test that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// Runs the body of the test `name` in a process in which no other test runs.
///
/// # Panics
/// When it fails there, or does not end.
pub fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var(CHILD).is_ok_and(|only| only == name) {
        return test();
    }
    let mut child = Command::new(std::env::current_exe().expect("a program knows its file"))
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, name)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this program runs once more");
    let (said, errors) = (listen(child.stdout.take()), listen(child.stderr.take()));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if start.elapsed() > LIMIT {
            // It may have ended by itself just now.
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = |listener: JoinHandle<String>| listener.join().expect("a reader does not panic");
    print!("{}", text(said));
    assert!(status.success(), "{status} after {:?}\n{}", start.elapsed(), text(errors));
}

/// Reads to the end what a child says.
fn listen(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            // What cannot be read is only missing from the message.
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
