//! The benchmark tables and their options.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[cfg(feature = "arena")]
use afresh_bench::fault;
#[cfg(feature = "http")]
use afresh_bench::serve;
use afresh_bench::{
    Options, arena, density, grow, js, python, restore, session, start, steady, wasm,
};
use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;
use tempfile::TempDir;

use crate::output::{Format, row_printer, say};

#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Run a rough version within a minute.
    #[arg(long)]
    quick: bool,
    /// Run only rows with this text in their case or strategy.
    #[arg(long)]
    filter: Option<String>,
}

impl CommonArgs {
    fn options(&self) -> Options {
        let options = if self.quick { Options::quick() } else { Options::full() };
        Options { filter: self.filter.clone(), ..options }
    }
}

#[derive(Debug, Args)]
pub(crate) struct RivalsArgs {
    /// Directory of the rivals, which `cargo xtask rivals` installs.
    #[arg(long, value_name = "DIR", default_value = "target/rivals")]
    rivals: PathBuf,
}

impl RivalsArgs {
    /// Reports the installed version of a rival, which the page of a report has.
    fn report_version(&self, name: &str) {
        if let Ok(version) = std::fs::read_to_string(self.rivals.join(name).join("version")) {
            eprintln!("version: {}", version.trim());
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Table {
    /// Calls of Wasm guests from the warm state, compared with the best configurations of wasmtime.
    Wasm {
        #[command(flatten)]
        common: CommonArgs,
        /// Measure this module instead of the built-in ones.
        #[arg(long, requires = "call")]
        module: Option<PathBuf>,
        /// Export of --module to call, without arguments and results, or with --input.
        #[arg(long)]
        call: Option<String>,
        /// Input for a byte guest, which its export `warm` warms.
        #[arg(long)]
        input: Option<String>,
        /// Path of the JavaScript guest for `js/request`.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
        #[command(flatten)]
        rivals: RivalsArgs,
    },
    /// Writes to a plain slot and its reset.
    Arena {
        #[command(flatten)]
        common: CommonArgs,
    },
    #[cfg(feature = "vm")]
    /// Calls and resets of micro-VMs, by memory size and dirty pages.
    Vm {
        #[command(flatten)]
        common: CommonArgs,
        /// Path of the `dirty` sample guest.
        #[arg(long, default_value = "target/guests/vm/dirty")]
        guest: PathBuf,
    },
    #[cfg(feature = "arena")]
    /// First touch of zero memory from the kernel and from the frame pool.
    Fault {
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Mappings, descriptors and memory of many live guests, compared with wasmtime's pooling
    /// allocator and with a fork for each request. A twentieth of them with --quick.
    Density {
        #[command(flatten)]
        common: CommonArgs,
        /// Path of the JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
    },
    /// Lazy restore of 512 MiB, compared with the same touches of a plain mmap.
    Restore {
        #[command(flatten)]
        common: CommonArgs,
        /// Directory for the files of the benchmark.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Writing snapshots of 512 MiB, compared with writing a file of the same size.
    Save {
        #[command(flatten)]
        common: CommonArgs,
        /// Path of the `dirty` sample guest.
        #[arg(long, default_value = "target/guests/vm/dirty")]
        guest: PathBuf,
        /// Directory for the files of the benchmark.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Time from a snapshot to the first answer of the JavaScript guest, compared with a full fetch
    /// and a warm-up.
    Start {
        #[command(flatten)]
        common: CommonArgs,
        /// Path of the JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
        /// Directory for the snapshots of the benchmark.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// URL of a remote to measure as well.
        #[arg(long, value_name = "URL")]
        remote: Option<String>,
    },
    /// Checkpoints, rollbacks and forks of the live JavaScript guest, compared with a copy of its
    /// heap.
    Session {
        #[command(flatten)]
        common: CommonArgs,
        /// Path of the JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
    },
    /// Sandboxes by the Python package: first commands, forks, figures and turns of an agent.
    Sandbox {
        #[command(flatten)]
        common: CommonArgs,
        /// Python that has the package, and the rivals and libraries that are to be measured.
        #[arg(long, value_name = "PYTHON", default_value = "python3")]
        python: PathBuf,
        /// Command of afresh, for `afresh mcp`.
        #[arg(long, value_name = "COMMAND")]
        afresh: Option<PathBuf>,
    },
    #[cfg(feature = "linux")]
    /// Calls, clones, thaws and starts of unmodified CPython, compared with a fork server and new
    /// processes.
    Linux {
        #[command(flatten)]
        common: CommonArgs,
        /// Directory for the snapshots of the benchmark.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    #[cfg(feature = "linux")]
    /// System calls and starts of CPython, compared with gVisor's `runsc`.
    Gvisor {
        #[command(flatten)]
        common: CommonArgs,
        #[command(flatten)]
        rivals: RivalsArgs,
    },
    #[cfg(feature = "linux")]
    /// Python code in sandboxes, compared with eryx.
    Eryx {
        #[command(flatten)]
        common: CommonArgs,
        #[command(flatten)]
        rivals: RivalsArgs,
    },
    /// Executions of fuzz targets, compared with AFL++ and LibAFL's fork server.
    Fuzz {
        #[command(flatten)]
        common: CommonArgs,
        #[command(flatten)]
        rivals: RivalsArgs,
    },
    #[cfg(feature = "fleet")]
    /// Simulation of a fleet of 10,000 hosts and 10 million sessions with the hosts' own placement
    /// code. A hundredth of that with --quick.
    Fleet {
        #[command(flatten)]
        common: CommonArgs,
    },
    #[cfg(feature = "http")]
    /// Requests over HTTP, compared with `wasmtime serve` on the same component, and sandbox
    /// operations.
    Serve {
        #[command(flatten)]
        common: CommonArgs,
        /// Command of afresh, by default the one in the folder of this program.
        #[arg(long, value_name = "COMMAND")]
        afresh: Option<PathBuf>,
        /// Command of wasmtime 48, from `cargo install wasmtime-cli@48`.
        #[arg(long, default_value = "wasmtime")]
        wasmtime: PathBuf,
        /// Path of the HTTP component.
        #[arg(long, default_value = "target/guests/http.wasm")]
        http: PathBuf,
        /// Path of the JavaScript guest.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
        /// Path of the JavaScript guest as an HTTP component.
        ///
        /// `rivals/jshttp/Cargo.toml` shows its build.
        #[arg(long, default_value = "rivals/jshttp/target/wasm32-wasip2/release/jshttp.wasm")]
        jshttp: PathBuf,
        /// Path of the interpreter that sandboxes run.
        #[arg(long, default_value = "target/guests/quickjs.wasm")]
        script: PathBuf,
        /// Command of nats-server, for a sandbox that is fetched from S3.
        #[arg(long, requires = "versitygw")]
        nats_server: Option<PathBuf>,
        /// Command of versitygw, the S3 server over a directory for the same case.
        #[arg(long, requires = "nats_server")]
        versitygw: Option<PathBuf>,
    },
    /// Make N calls of the small module and nothing else, for strace.
    #[command(hide = true)]
    Steady {
        /// Number of calls.
        calls: u64,
        /// Function to call.
        #[arg(default_value = steady::DIRTYING)]
        function: String,
    },
}

fn steady_state(format: Format) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let steady = steady::measure(&program, &["steady"])?;
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

/// Reads the JavaScript guest.
fn javascript(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| {
        format!("cannot read {}; `cargo xtask guests --only js` builds it", path.display())
    })
}

/// The options of benchmarks on snapshot files.
fn restoring(common: &CommonArgs, dir: Option<&PathBuf>) -> restore::Options {
    let mut options =
        if common.quick { restore::Options::quick() } else { restore::Options::default() };
    options.filter.clone_from(&common.filter);
    if let Some(dir) = dir {
        options.dir.clone_from(dir);
    }
    options
}

/// An empty directory in `parent`, or in the system's temporary directory.
fn scratch(parent: Option<&Path>) -> anyhow::Result<TempDir> {
    let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
    tempfile::Builder::new()
        .prefix("afresh-")
        .tempdir_in(&parent)
        .with_context(|| format!("cannot create a directory in {}", parent.display()))
}

/// The command `afresh`: the given one, else the one in the folder of this program, else the one in
/// `PATH`.
fn afresh_command(given: Option<&PathBuf>) -> PathBuf {
    let beside = || {
        let path = std::env::current_exe().ok()?.with_file_name("afresh");
        path.is_file().then_some(path)
    };
    given.cloned().or_else(beside).unwrap_or_else(|| PathBuf::from("afresh"))
}

/// Runs one table.
pub(crate) fn run(table: &Table, format: Format) -> anyhow::Result<ExitCode> {
    let mut print = row_printer(format);
    match table {
        Table::Wasm { common, module, call, input, js: js_guest, rivals } => {
            let wago = afresh_bench::wago::find(&rivals.rivals);
            let wago = wago.inspect_err(|error| eprintln!("wago left out: {error:#}")).ok();
            let wago = wago.as_deref();
            if wago.is_some() {
                rivals.report_version("wago");
            }
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
                    None => wasm::module(&bytes, call, &case, wago, &options, &mut print)?,
                }
                return Ok(ExitCode::SUCCESS);
            }
            wasm::all(wago, &options, &mut print)?;
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
            #[cfg(feature = "http")]
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
            });
        }
        Table::Density { common, js } => {
            let wasm = std::fs::read(js);
            if let Err(error) = &wasm {
                eprintln!("js left out: {}: {error}", js.display());
            }
            let counts =
                if common.quick { density::Counts::quick() } else { density::Counts::full() };
            density::all(wasm.as_deref().ok(), counts, &common.options(), &mut print)?;
        }
        Table::Restore { common, dir } => {
            let options = restoring(common, dir.as_ref());
            restore::restore(&options, &mut print)?;
        }
        Table::Save { common, guest, dir } => {
            let mut options = restoring(common, dir.as_ref());
            options.vm_guest.clone_from(guest);
            restore::save(&options, &mut print)?;
        }
        Table::Session { common, js } => {
            // In the same directory, for the cases of a small heap.
            let small = std::fs::read(js.with_file_name("quickjs.wasm"));
            if let Err(error) = &small {
                eprintln!("js1: left out: quickjs.wasm next to {}: {error}", js.display());
            }
            let small = small.as_deref().ok();
            session::all(&javascript(js)?, small, &common.options(), &mut print)?;
        }
        Table::Start { common, js, dir, remote } => {
            let wasm = javascript(js)?;
            let folder = scratch(dir.as_deref())?;
            let (options, remote) = (common.options(), remote.as_deref());
            start::start(&wasm, js::REQUEST, folder.path(), remote, &options, &mut print)?;
        }
        Table::Sandbox { common, python, afresh } => {
            let program = afresh_command(afresh.as_ref());
            let options = common.options();
            afresh_bench::sandbox::all(python, &program, &options, common.quick, &mut print)?;
        }
        #[cfg(feature = "linux")]
        Table::Linux { common, dir } => {
            let folder = scratch(dir.as_deref())?;
            let options = common.options();
            afresh_bench::linux_table::all(folder.path(), &options, &mut print, &mut |case| {
                eprintln!("{case} left out: the host lacks a program or module that it needs");
            })?;
        }
        #[cfg(feature = "linux")]
        Table::Gvisor { common, rivals } => {
            let runsc = match afresh_bench::gvisor::find(&rivals.rivals) {
                Ok((runsc, version)) => {
                    eprintln!("version: gVisor {version}");
                    Some(runsc)
                }
                Err(error) => {
                    eprintln!("gvisor left out: {error:#}");
                    None
                }
            };
            let mut omitted = |strategy: &str, error: &anyhow::Error| {
                eprintln!("{strategy} left out: {error:#}");
            };
            let options = common.options();
            afresh_bench::gvisor::all(runsc.as_deref(), &options, &mut print, &mut omitted)?;
        }
        #[cfg(feature = "linux")]
        Table::Eryx { common, rivals } => {
            rivals.report_version("eryx");
            let mut omitted = |error: &anyhow::Error| eprintln!("eryx left out: {error:#}");
            afresh_bench::eryx::all(&rivals.rivals, &common.options(), &mut print, &mut omitted)?;
        }
        Table::Fuzz { common, rivals } => match afresh_bench::fuzz::find(&rivals.rivals) {
            Ok(program) => {
                rivals.report_version("fuzz");
                let options = common.options();
                afresh_bench::fuzz::all(&program, common.quick, &options, &mut print)?;
            }
            Err(error) => eprintln!("fuzz left out: {error:#}"),
        },
        #[cfg(feature = "fleet")]
        Table::Fleet { common } => {
            let scale = match common.quick {
                true => afresh_bench::fleet::Scale::quick(),
                false => afresh_bench::fleet::Scale::full(),
            };
            afresh_bench::fleet::all(scale, &common.options(), &mut print)?;
        }
        #[cfg(feature = "http")]
        Table::Serve {
            common,
            afresh,
            wasmtime,
            http,
            js,
            jshttp,
            script,
            nats_server,
            versitygw,
        } => {
            let there = std::process::Command::new(wasmtime).arg("--version").output();
            let there = there.is_ok_and(|output| output.status.success());
            if !there {
                eprintln!(
                    "wasmtime left out: {} does not run; `cargo install wasmtime-cli@48` installs it",
                    wasmtime.display()
                );
            }
            let files = serve::Files {
                program: afresh_command(afresh.as_ref()),
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
