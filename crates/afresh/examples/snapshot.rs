//! A snapshot saved and opened elsewhere: the state that a guest learnt is kept in one file, which
//! needs nothing else.
//!
//! `cargo run -p afresh --example snapshot`

use std::path::Path;

use afresh::{Call, Guest, Options, SaveOptions};

/// Learns numbers, and returns their sum.
const LEARNER: &str = r#"(module
    (memory 20)
    (func (export "learn") (param i32)
        (i32.store (i32.const 900000) (i32.add (i32.load (i32.const 900000)) (local.get 0))))
    (func (export "sum") (result i32) (i32.load (i32.const 900000))))"#;

/// Warms a guest, lets it learn more, and saves its state to the file `to`.
pub(crate) fn save(to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::new().warm(Call::text("learn", ["40"]));
    let guest = Guest::from_bytes("learner", &wat::parse_str(LEARNER)?, &options)?;
    let mut lease = guest.lease()?;
    lease.invoke(&Call::text("learn", ["2"]))?;
    // The working set of a call to `sum` is read first when the snapshot is opened.
    let options = SaveOptions::new().record(Call::text("sum", [] as [&str; 0]));
    let saved = lease.save(&to.display().to_string().parse()?, &options)?;
    println!("saved {}: {} pages", saved.id, saved.snapshot.pages());
    Ok(())
}

/// Opens the file, in this process or another, and queries the learnt sum.
pub(crate) fn open(file: &Path) -> Result<String, Box<dyn std::error::Error>> {
    let guest = afresh::open(file.display().to_string(), &Options::new())?;
    Ok(guest.invoke(&Call::text("sum", [] as [&str; 0]))?.text())
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The second process has only the file.
    if let Some(file) = std::env::args_os().nth(1) {
        println!("in process {}: the sum is {}", std::process::id(), open(Path::new(&file))?);
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("learnt.afresh");
    save(&file)?;
    let status = std::process::Command::new(std::env::current_exe()?).arg(&file).status()?;
    if status.success() { Ok(()) } else { Err("the other process failed".into()) }
}
