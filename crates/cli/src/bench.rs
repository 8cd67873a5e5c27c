//! `afresh bench`: tables of figures, with rivals in the same run.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[cfg(feature = "arena")]
use afresh_bench::fault;
#[cfg(feature = "serve")]
use afresh_bench::serve;
use afresh_bench::{Options, Row, arena, grow, js, python, restore, session, start, steady, wasm};
use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use crate::scratch::Scratch;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    table: Table,
}

#[derive(Debug, Args)]
struct Common {
    /// A rough look, within a minute.
    #[arg(long)]
    quick: bool,
    /// Only rows whose case or strategy contains this.
    #[arg(long)]
    filter: Option<String>,
}

impl Common {
    fn options(&self) -> Options {
        let options = if self.quick { Options::quick() } else { Options::full() };
        Options { filter: self.filter.clone(), ..options }
    }
}

#[derive(Debug, Subcommand)]
enum Table {
    /// Pristine calls of Wasm guests, compared with the best configurations of wasmtime.
    Wasm {
        #[command(flatten)]
        common: Common,
        /// A module of your own instead of the built-in ones.
        #[arg(long, requires = "call")]
        module: Option<PathBuf>,
        /// Its export to call: without arguments or results, or with --input.
        #[arg(long)]
        call: Option<String>,
        /// Bytes for a guest that handles bytes, warmed by its export `warm`.
        #[arg(long)]
        input: Option<String>,
        /// The JavaScript guest for `js/request`.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
    },
    /// Dirtying and resetting a plain slot.
    Arena {
        #[command(flatten)]
        common: Common,
    },
    #[cfg(feature = "vm")]
    /// Micro-VMs: call and reset, by memory size and dirty pages.
    Vm {
        #[command(flatten)]
        common: Common,
        /// The `dirty` sample guest.
        #[arg(long, default_value = "target/guests/vm/dirty")]
        guest: PathBuf,
    },
    #[cfg(feature = "arena")]
    /// First touch: fresh zero memory by the kernel's ways and by the frame pool's.
    Fault {
        #[command(flatten)]
        common: Common,
    },
    /// Lazy restore of 512 MiB, compared with a plain mmap and the same touches.
    Restore {
        #[command(flatten)]
        common: Common,
        /// Where the files of the benchmark are made.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Writing snapshots of 512 MiB, compared with writing a file of the same size.
    Save {
        #[command(flatten)]
        common: Common,
        /// Where the files of the benchmark are made.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// From a snapshot to the first answer of the JavaScript guest, compared with fetching it whole and warming it.
    Start {
        #[command(flatten)]
        common: Common,
        /// The JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
        /// Where the snapshots of the benchmark are made.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// A remote to open them in as well: a URL.
        #[arg(long, value_name = "URL")]
        remote: Option<String>,
    },
    /// Checkpoints, rollbacks and forks of the live JavaScript guest, compared with copying its whole heap.
    Session {
        #[command(flatten)]
        common: Common,
        /// The JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
    },
    #[cfg(feature = "linux")]
    /// Unmodified CPython: pristine calls, clones, thaws and starts, compared with a fork server and new processes.
    Linux {
        #[command(flatten)]
        common: Common,
        /// Where the snapshots of the benchmark are made.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    #[cfg(feature = "fleet")]
    /// A fleet of 10,000 hosts and 10 million sessions, simulated with the code that hosts decide with. --quick: a
    /// hundredth.
    Fleet {
        #[command(flatten)]
        common: Common,
    },
    #[cfg(feature = "serve")]
    /// Requests over HTTP, compared with `wasmtime serve` on the same component; and sandbox operations.
    Serve {
        #[command(flatten)]
        common: Common,
        /// The command of wasmtime 48 (`cargo install wasmtime-cli@48`).
        #[arg(long, default_value = "wasmtime")]
        wasmtime: PathBuf,
        /// The HTTP component.
        #[arg(long, default_value = "target/guests/http.wasm")]
        http: PathBuf,
        /// The JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
        /// The JavaScript guest as an HTTP component; see `rivals/jshttp/Cargo.toml` for its build.
        #[arg(long, default_value = "rivals/jshttp/target/wasm32-wasip2/release/jshttp.wasm")]
        jshttp: PathBuf,
        /// The interpreter that sandboxes run.
        #[arg(long, default_value = "target/guests/quickjs.wasm")]
        script: PathBuf,
        /// A nats-server, for a sandbox that is fetched from S3.
        #[arg(long, requires = "versitygw")]
        nats_server: Option<PathBuf>,
        /// An S3 server over a directory, for the same.
        #[arg(long, requires = "nats_server")]
        versitygw: Option<PathBuf>,
    },
    /// Makes N calls of the small module and nothing else, for strace to look at.
    #[command(hide = true)]
    Steady {
        /// How many.
        calls: u64,
        /// Of which function.
        #[arg(default_value = steady::DIRTYING)]
        function: String,
    },
}

/// One row as text: a heading when the case changes, and columns.
fn print_text(out: &mut dyn Write, last: &mut String, row: &Row) -> std::io::Result<()> {
    if *last != row.case {
        last.clone_from(&row.case);
        writeln!(
            out,
            "\n{:<18} {:<28} {:>3} {:>13} {:>13} {:>13}",
            row.case, "strategy", "thr", "median", "min", "p99"
        )?;
    }
    let Row { strategy, threads, median, min, p99, unit, .. } = row;
    writeln!(
        out,
        "{:<18} {strategy:<28} {threads:>3} {median:>13.3} {min:>13.3} {p99:>13.3} {unit}",
        "",
    )
}

/// Prints rows as they come.
fn printer(format: Format) -> impl FnMut(&Row) {
    let mut last = String::new();
    move |row| {
        let mut out = std::io::stdout().lock();
        // An error means that the reader has left, so it is not reported.
        let _ = match format {
            Format::Json => writeln!(out, "{}", row.json()),
            Format::Text => print_text(&mut out, &mut last, row),
        };
    }
}

fn steady_state(format: Format) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let steady = steady::measure(&program, &["bench", "steady"])?;
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "table": "steady", "case": "small/scatter64", "calls": steady.calls,
                "faults": steady.faults, "system_calls": steady.system_calls,
            })
        )?,
        Format::Text => say!(
            "\nsteady state: {} calls of small/scatter64 took {} page faults and {} system calls",
            steady.calls,
            steady.faults,
            steady.system_calls.map_or("an unknown number of".to_owned(), |n| n.to_string()),
        )?,
    }
    Ok(())
}

/// The JavaScript guest.
fn javascript(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| {
        format!("cannot read {}; `cargo xtask guests --only js` builds it", path.display())
    })
}

/// The options of benchmarks on snapshot files.
fn restoring(common: &Common, dir: Option<&PathBuf>) -> restore::Options {
    let mut options =
        if common.quick { restore::Options::quick() } else { restore::Options::default() };
    options.filter.clone_from(&common.filter);
    if let Some(dir) = dir {
        options.dir.clone_from(dir);
    }
    options
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let format = settings.output;
    let mut print = printer(format);
    match &arguments.table {
        Table::Wasm { common, module, call, input, js: js_guest } => {
            let options = common.options();
            if let (Some(path), Some(call)) = (module, call) {
                let bytes = std::fs::read(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let stem = path.file_stem().unwrap_or_default().to_string_lossy();
                let case = format!("{stem}/{call}");
                match input {
                    Some(input) => {
                        js::request(&bytes, &case, input.as_bytes(), &options, &mut print)?
                    }
                    None => wasm::module(&bytes, call, &case, &options, &mut print)?,
                }
                return Ok(ExitCode::SUCCESS);
            }
            wasm::all(&options, &mut print)?;
            grow::all(&options, &mut print)?;
            match std::fs::read(js_guest) {
                Ok(bytes) => js::request(&bytes, "js/request", js::REQUEST, &options, &mut print)?,
                Err(error) => eprintln!(
                    "js/request left out: {}: {error}; `cargo xtask guests --only js` builds it",
                    js_guest.display()
                ),
            }
            match python::module(js_guest) {
                Some(path) => python::all(&path, &options, &mut print)?,
                None => eprintln!(
                    "python left out: no {} next to {}, and $AFRESH_PYTHON is not set; `cargo xtask registry-guests` \
                     installs it",
                    python::PLACE,
                    js_guest.display()
                ),
            }
            #[cfg(feature = "serve")]
            for (name, file, target, how) in [
                ("hello", "http", "/hello", "guests --only http"),
                ("js-http", "js-http", "/?under=10", "registry-guests"),
                ("py-http", "py-http", "/?under=10", "registry-guests"),
            ] {
                let (case, path) =
                    (format!("component/{name}"), js_guest.with_file_name(format!("{file}.wasm")));
                match path.is_file() {
                    true => afresh_bench::component::handler(
                        &path, target, &case, &options, &mut print,
                    )?,
                    false => eprintln!(
                        "{case} left out: no {}; `cargo xtask {how}` builds it",
                        path.display()
                    ),
                }
            }
            steady_state(format)?;
        }
        Table::Arena { common } => arena::all(&common.options(), &mut print)?,
        #[cfg(feature = "vm")]
        Table::Vm { common, guest } => {
            let elf = std::fs::read(guest).with_context(|| {
                format!("cannot read {}; `cargo xtask guests --only vm` builds it", guest.display())
            })?;
            afresh_bench::vm::all(&elf, &common.options(), &mut print)?;
        }
        #[cfg(feature = "arena")]
        Table::Fault { common } => {
            let mut options =
                if common.quick { fault::Options::quick() } else { fault::Options::default() };
            options.filter.clone_from(&common.filter);
            fault::fault(&options, &mut print, &mut |what, why| {
                eprintln!("{what}: left out: {why:#}");
            })?;
        }
        Table::Restore { common, dir } => {
            let options = restoring(common, dir.as_ref());
            restore::restore(&options, &mut print)?;
        }
        Table::Save { common, dir } => {
            let options = restoring(common, dir.as_ref());
            restore::save(&options, &mut print)?;
        }
        Table::Session { common, js } => {
            // Beside it, for the cases of a small heap.
            let small = std::fs::read(js.with_file_name("quickjs.wasm"));
            if let Err(error) = &small {
                eprintln!("js1: left out: quickjs.wasm next to {}: {error}", js.display());
            }
            let small = small.as_deref().ok();
            session::all(&javascript(js)?, small, &common.options(), &mut print)?;
        }
        Table::Start { common, js, dir, remote } => {
            let wasm = javascript(js)?;
            let scratch = Scratch::new(dir.as_deref())?;
            let (options, remote) = (common.options(), remote.as_deref());
            start::start(&wasm, js::REQUEST, scratch.path(), remote, &options, &mut print)?;
        }
        #[cfg(feature = "linux")]
        Table::Linux { common, dir } => {
            let scratch = Scratch::new(dir.as_deref())?;
            let options = common.options();
            afresh_bench::linux::all(scratch.path(), &options, &mut print, &mut |case| {
                eprintln!("{case}: left out: python3 lacks the modules it needs");
            })?;
        }
        #[cfg(feature = "fleet")]
        Table::Fleet { common } => {
            let scale = match common.quick {
                true => afresh_bench::fleet::Scale::quick(),
                false => afresh_bench::fleet::Scale::full(),
            };
            afresh_bench::fleet::all(scale, &common.options(), &mut print)?;
        }
        #[cfg(feature = "serve")]
        Table::Serve { common, wasmtime, http, js, jshttp, script, nats_server, versitygw } => {
            let there = std::process::Command::new(wasmtime).arg("--version").output();
            let there = there.is_ok_and(|output| output.status.success());
            if !there {
                eprintln!(
                    "wasmtime left out: {} does not run; `cargo install wasmtime-cli@48` has it",
                    wasmtime.display()
                );
            }
            let files = serve::Files {
                program: std::env::current_exe().context("finding this program")?,
                wasmtime: there.then(|| wasmtime.clone()),
                http: http.clone(),
                js: js.clone(),
                jshttp: jshttp.clone(),
                script: script.clone(),
                far: nats_server.clone().zip(versitygw.clone()),
            };
            serve::all(&files, &common.options(), &mut print)?;
        }
        Table::Steady { calls, function } => {
            steady::run(*calls, function)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
