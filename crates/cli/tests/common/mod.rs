//! Shared by the test programs that run Linux guests.

use std::process::Output;

/// Whether this host cannot run guests, or lacks the program, by the error of a first guest. Prints
/// why. Any other failure fails the tests.
pub(crate) fn lacks_guests(output: &Output) -> bool {
    let why = String::from_utf8_lossy(&output.stderr);
    let lacks = ["not found in PATH", "seccomp", "userfaultfd", "denied", "not permitted"];
    let skipped = !output.status.success() && lacks.iter().any(|word| why.contains(word));
    if skipped {
        println!("SKIPPED: {}", why.trim());
    }
    skipped
}
