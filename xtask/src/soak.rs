//! `cargo xtask soak`: warm guests against plain wasmtime, with `--server` a fleet of servers under
//! load, or with `--fleet` a fleet under faults and a checker, for the given number of seconds.
//! With `--pager`, VMMs whose pagers are killed, for the given number of kills.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, run};
use crate::{host, tools};

/// A test, and the variable for its seconds.
struct Soak {
    test: &'static str,
    variable: &'static str,
    /// Without an argument.
    seconds: &'static str,
}

const SERVER: Soak = Soak { test: "soak::a_soak", variable: "AFRESH_SOAK_SECONDS", seconds: "60" };
const FLEET: Soak =
    Soak { test: "checker::a_fleet", variable: "AFRESH_CHECKER_SECONDS", seconds: "1800" };
/// Built together with its tests, so that the dependencies are those of all tests, and there
/// already.
const ALL: [&str; 4] = ["test", "--workspace", "--all-features", "--locked"];

/// `cargo xtask soak`; without `--server`, `--fleet` and `--pager` the program knows the arguments.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    match arguments.split_first() {
        Some((first, rest)) if first == "--server" => return server(&SERVER, rest),
        Some((first, rest)) if first == "--fleet" => return server(&FLEET, rest),
        Some((first, rest)) if first == "--pager" => return pager(rest),
        _ => {}
    }
    let folder = host::target_folder();
    run(cargo().current_dir(host::repository()).args(ALL).args(["--no-run", "--test", "suites"]))?;
    run(Command::new(folder.join("debug/afresh-proof"))
        .arg("--keep")
        .arg(folder.join("soak"))
        .args(arguments))
}

fn server(soak: &Soak, arguments: &[String]) -> Result<()> {
    let seconds = match arguments {
        [] => soak.seconds,
        [name, seconds] if name == "--seconds" => seconds,
        _ => bail!("usage: cargo xtask soak --server|--fleet [--seconds N]"),
    };
    seconds.parse::<u64>().with_context(|| format!("{seconds} is no number of seconds"))?;
    let tools = tools::install();
    let mut test = cargo();
    test.current_dir(host::repository()).args(ALL).args(["--test", "fleet"]);
    test.args(["--", soak.test, "--nocapture"]).env(soak.variable, seconds);
    let mut missing = Vec::new();
    tools.finish(&mut test, |line| missing.push(line.to_owned()));
    missing.iter().for_each(|line| println!("{line}"));
    run(&mut test)
}

/// Kills without an argument.
const KILLS: &str = "10000";

fn pager(arguments: &[String]) -> Result<()> {
    let kills = match arguments {
        [] => KILLS,
        [name, kills] if name == "--kills" => kills,
        _ => bail!("usage: cargo xtask soak --pager [--kills N]"),
    };
    kills.parse::<u64>().with_context(|| format!("{kills} is no number of kills"))?;
    let mut test = cargo();
    test.current_dir(host::repository()).args(ALL).args(["--test", "suite"]);
    test.args(["--", "vmm::kill::a_killed_pager", "vmm::kill::a_pager_that_is_killed_while"]);
    test.args(["--nocapture", "--test-threads", "1"]).env("AFRESH_TEST_KILLS", kills);
    run(&mut test)
}
