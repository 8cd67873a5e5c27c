//! A test in a separate process, for code that affects the whole process (a fork, a filter of
//! system calls, a limit), and must not meet other tests.
//!
//! Promises: the test ran, alone, and passed; one that hangs is ended; a name that no test has is
//! an error. For the tests of this workspace only.

use std::collections::BTreeSet;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Set in the separate process.
const CHILD: &str = "AFRESH_TEST_ALONE";
/// A test that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// The command that runs the test `name`, and no other, in this program again. The caller marks the
/// purpose of that process by a variable.
///
/// # Panics
/// When no test has that name: the process would run nothing, and end well.
pub fn test_command(name: &str) -> Command {
    static TEST_NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let program = std::env::current_exe().expect("a program knows its file");
    let mut known = TEST_NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if !known.contains(name) {
        let list = Command::new(&program)
            .args([name, "--exact", "--list"])
            .output()
            .expect("this program runs once more");
        let list = String::from_utf8_lossy(&list.stdout);
        assert!(
            list.lines().any(|line| line.strip_suffix(": test") == Some(name)),
            "no test is called {name}"
        );
        known.insert(name.to_owned());
    }
    let mut command = Command::new(program);
    command.args([name, "--exact", "--nocapture"]);
    command
}

/// Runs the body of the test `name` in a process in which no other test runs.
///
/// # Panics
/// When it fails there, or does not end, or no test has that name.
pub fn run_isolated(name: &str, test: impl FnOnce()) {
    if std::env::var(CHILD).is_ok_and(|only| only == name) {
        return test();
    }
    let mut child = test_command(name)
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

/// Reads the output of a child to the end.
fn listen(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            // Unreadable output is only missing from the message.
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::{run_isolated, test_command};

    #[test]
    #[should_panic(expected = "no test is called isolated_test::tests::that_nobody_wrote")]
    fn a_name_that_no_test_has_is_not_a_test_that_passed() {
        run_isolated("isolated_test::tests::that_nobody_wrote", || ());
    }

    /// Part of a name is not a name: `--exact` would run nothing.
    #[test]
    #[should_panic(expected = "no test is called isolated_test::tests")]
    fn a_module_is_not_a_test() {
        test_command("isolated_test::tests");
    }
}
