//! `cargo xtask soak`: warm guests against plain wasmtime, or with `--server` a fleet of servers under load, for as long as it is told to.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, run};
use crate::{host, tools};

/// The test of a fleet under load, and what says how long it lasts.
const SERVER: &str = "soak::a_soak";
const SECONDS: &str = "AFRESH_SOAK_SECONDS";
/// Built together with its tests, so that the dependencies are those of all tests, and there already.
const ALL: [&str; 4] = ["test", "--workspace", "--all-features", "--locked"];

/// `cargo xtask soak`; without `--server` the program knows the arguments.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    if let Some((first, rest)) = arguments.split_first()
        && first == "--server"
    {
        return server(rest);
    }
    let folder = host::target_folder();
    run(cargo().current_dir(host::repository()).args(ALL).args(["--no-run", "--test", "suites"]))?;
    run(Command::new(folder.join("debug/afresh-proof"))
        .arg("--keep")
        .arg(folder.join("soak"))
        .args(arguments))
}

fn server(arguments: &[String]) -> Result<()> {
    let seconds = match arguments {
        [] => "60",
        [name, seconds] if name == "--seconds" => seconds,
        _ => bail!("usage: cargo xtask soak --server [--seconds N]"),
    };
    seconds.parse::<u64>().with_context(|| format!("{seconds} is no number of seconds"))?;
    let tools = tools::install();
    let mut test = cargo();
    test.current_dir(host::repository()).args(ALL).args(["--test", "fleet"]);
    test.args(["--", SERVER, "--nocapture"]).env(SECONDS, seconds);
    let mut missing = Vec::new();
    tools.finish(&mut test, |line| missing.push(line.to_owned()));
    missing.iter().for_each(|line| println!("{line}"));
    run(&mut test)
}
