//! Runs a Linux program once, from its start to its end, and prints its output:
//! `once [--dir DIR]… [--env NAME=VALUE]… [--seconds N] [--memory MIB] [--user NUMBER] PROGRAM
//! [ARGUMENT…]`. It exits as the program did; with 125, and the reason, if the program could not be
//! run to its end.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::Duration;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn run() -> Result<u8, Box<dyn std::error::Error>> {
    use afresh_linux::{End, Program};

    let mut arguments = std::env::args().skip(1);
    let (mut dirs, mut vars, mut user) = (Vec::new(), Vec::new(), None);
    let (mut seconds, mut memory) = (60, 4096);
    let path = loop {
        let next = arguments.next().ok_or("a program is missing")?;
        let mut value = || arguments.next().ok_or(format!("{next} needs a value"));
        match next.as_str() {
            "--dir" => dirs.push(value()?),
            "--env" => vars.push(value()?),
            "--seconds" => seconds = value()?.parse()?,
            "--memory" => memory = value()?.parse::<u64>()?,
            "--user" => user = Some(value()?.parse()?),
            _ => break next,
        }
    };
    let limit = Duration::from_secs(seconds);
    let mut program = Program::new(path).directory("/tmp").start_limit(limit);
    program = program.memory_limit(memory << 20);
    if let Some(user) = user {
        program = program.user(user, user);
    }
    program = arguments.fold(program, Program::arg);
    program = dirs.into_iter().fold(program, Program::grant);
    for (name, value) in vars.iter().filter_map(|var| var.split_once('=')) {
        program = program.env(name, value);
    }
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input)?;
    let run = program.run(&input)?;
    std::io::stdout().write_all(&run.output)?;
    std::io::stderr().write_all(run.messages.as_bytes())?;
    match run.end {
        End::Exit(status) => Ok(status as u8),
        End::Signal(signal) => {
            eprintln!("ended by signal {signal}");
            Ok(128 + signal as u8)
        }
        end => Err(end.to_string().into()),
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn run() -> Result<u8, Box<dyn std::error::Error>> {
    Err("guests of this kind need Linux on x86-64".into())
}

fn main() -> ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("once: {error}");
            ExitCode::from(125)
        },
        ExitCode::from,
    )
}
