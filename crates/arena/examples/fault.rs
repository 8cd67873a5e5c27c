//! Runs the first-touch benchmark and prints a JSON line a row.
//!
//! `fault [--quick] [--case PART] [--strategy PART] [--threads N] [--rounds N]`

use afresh_arena::bench::{Options, fault};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "--quick" => options = Options::quick(),
            "--case" => options.case = Some(value()?),
            "--strategy" => options.strategy = Some(value()?),
            "--threads" => options.threads = vec![value()?.parse()?],
            "--rounds" => options.rounds = value()?.parse()?,
            _ => return Err(format!("unknown argument {name}").into()),
        }
    }
    fault(&options, &mut |row| println!("{row}"), &mut |name, error| {
        eprintln!("SKIPPED: {name}: {error}");
    })?;
    Ok(())
}
