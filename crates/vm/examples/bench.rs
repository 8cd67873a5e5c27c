//! Runs the micro-VM benchmark: `bench GUEST.elf [FILTER]`, one JSON object a line.

use std::error::Error;

use afresh_vm::bench::{BenchOptions, run};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let guest = arguments.next().ok_or("usage: bench GUEST.elf [FILTER]")?;
    let mut options = BenchOptions::default();
    options.filter = arguments.next();
    run(&std::fs::read(guest)?, &options, &mut std::io::stdout())?;
    Ok(())
}
