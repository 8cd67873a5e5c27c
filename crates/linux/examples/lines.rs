//! Serves lines with a warm program: each line of the input is a request, answered from the same
//! state.
//!
//! PROGRAM has an absolute path, reads lines, answers each and flushes.
//!
//! ```sh
//! cargo run --release -p afresh-linux --example lines -- [--grant DIRECTORY]... PROGRAM [ARGUMENT]...
//! ```
//!
//! To see it forget:
//!
//! ```sh
//! printf '1\n2\n3\n' | cargo run --release -p afresh-linux --example lines -- /usr/bin/python3 -uc 'import sys
//! seen = []
//! for line in sys.stdin: seen.append(line); print(line.strip(), "is the only one of", len(seen))'
//! ```

use std::io::{BufRead, Write};

use afresh_linux::Program;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let mut grants = Vec::new();
    while args.next_if(|arg| arg == "--grant").is_some() {
        grants.push(args.next().ok_or("--grant takes a directory")?);
    }
    let program = Program::new(args.next().ok_or("name a program, by its absolute path")?);
    let program = grants.into_iter().fold(program, |program, grant| program.grant(grant));
    let mut warm = args.fold(program, |program, arg| program.arg(arg)).warm()?.instance();
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        match warm.call_pristine(format!("{}\n", line?).as_bytes()) {
            Ok(answer) => output.write_all(&answer)?,
            Err(error) => eprintln!("{error}"),
        }
        output.flush()?;
    }
    for (number, count) in &warm.stats().unserved {
        eprintln!("system call {number} is not served; made {count} times");
    }
    Ok(())
}
