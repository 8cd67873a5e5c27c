//! Options that every command with a guest shares.

use std::path::PathBuf;
use std::time::Duration;

use afresh::{Call, Guest, Options};
use anyhow::Context;
use clap::Args;

use crate::Settings;
use crate::output::spinner;

/// A guest and how to run it.
#[derive(Debug, Args)]
pub(crate) struct GuestArguments {
    /// A Wasm module or component, a static-PIE ELF for a micro-VM, a Linux program, or a snapshot or a container's image:
    /// PLACE[@NAME], also oci://REGISTRY/REPOSITORY[:TAG].
    pub(crate) guest: String,
    #[command(flatten)]
    how: OpenArguments,
}

/// How guests are run.
#[derive(Debug, Args)]
pub(crate) struct OpenArguments {
    /// The guest is a Linux program, by its path or its name in PATH. Each call is input on its standard input, and lasts
    /// until it waits for more; the state in which it first waited is the warm one.
    #[cfg(feature = "linux")]
    #[arg(long)]
    linux: bool,
    /// Exported functions to call, in order, to warm the guest; arguments after a colon, separated
    /// by commas: `warm:100,2`. For a Linux program, an image's too, lines that it answers first; for a server, requests: `GET /path`.
    #[arg(long = "warm", value_name = "F[:ARGS]")]
    warm: Vec<String>,
    /// Repetitions of those calls. Programs that compile code they run often, as Node does, answer twenty times
    /// faster once that is compiled.
    #[arg(long, value_name = "N", default_value_t = 1)]
    warm_times: usize,
    /// Time limit of one call, in milliseconds.
    #[arg(long, value_name = "MS")]
    pub(crate) timeout: Option<u64>,
    /// Maximum MiB of one guest memory; for a micro-VM, its memory; for a Linux program, its mappings.
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// Directory for compiled guests between runs. Its files are native code: it must be yours alone.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Environment variables for the guest.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Host directories the guest may read, as HOST or HOST::GUEST; add `:rw` to let it write. A Linux program sees HOST
    /// where it is, and never writes there.
    #[arg(long, value_name = "HOST[::GUEST][:rw]")]
    pub(crate) dir: Vec<String>,
    /// Servers outside that a Linux program may connect to, as NAME:PORT (`*.NAME` and `*` for any port allowed), or as
    /// NAME:PORT=HOST:PORT for one that is elsewhere; none if not given.
    #[cfg(feature = "linux")]
    #[arg(long, value_name = "NAME:PORT[=HOST:PORT]")]
    net: Vec<afresh::linux::Destination>,
    /// Has every call of a Linux program run in a new process, so that the time of a write does not show which pages an earlier
    /// call has written. It costs a fork for each call.
    #[cfg(feature = "linux")]
    #[arg(long)]
    replace_processes: bool,
    #[cfg(feature = "wasm")]
    #[command(flatten)]
    pub(crate) wasm: crate::wasm::WasmArguments,
}

/// The arguments and input of a guest that runs a WASI command, and the destination of its output.
#[derive(Debug, Default)]
pub(crate) struct Command<'a> {
    /// Its arguments, after its name.
    pub(crate) arguments: &'a [String],
    /// Its standard input; without one this process's own if `interactive` is set.
    pub(crate) input: Option<Vec<u8>>,
    pub(crate) interactive: bool,
    /// Whether its output is shown.
    pub(crate) shown: bool,
    /// Calls of the warm-up before the requested ones.
    pub(crate) first: Vec<Call>,
    /// The language that a Linux program evaluates.
    #[cfg(all(feature = "serve", feature = "linux"))]
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

    /// The options of a Wasm guest among them.
    #[cfg(feature = "serve")]
    pub(crate) fn wasm(&self, command: Command<'_>) -> anyhow::Result<afresh::wasm::GuestOptions> {
        self.how.wasm.options(&self.guest, command, &self.how.env()?, &self.how.dir)
    }

    /// The options that open the guest as one that evaluates a language; a listener receives its requests.
    #[cfg(feature = "serve")]
    pub(crate) fn interpreter<L: afresh_interpreter::HostCallbacks>(
        &self,
        settings: &Settings,
        language: &'static afresh_interpreter::Language,
    ) -> anyhow::Result<Options> {
        use afresh::files::{Budget, Tree};
        #[cfg(feature = "linux")]
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
        let files = wasm.wasi.files.take().unwrap_or_else(|| Tree::new(Budget::default()));
        let (mut files, _) = language.over_library(files, path, None)?;
        files.make_directories("/tmp", afresh::files::Time::now())?;
        wasm.wasi.files = Some(files.clone());
        wasm.files_below = Some(files);
        Ok(options.wasm(wasm))
    }

    /// Time limit of one call, if set.
    #[cfg(feature = "serve")]
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.how.timeout.map(Duration::from_millis)
    }

    /// Opens what is named, and warms it if it is a guest.
    pub(crate) fn open(&self, options: &Options) -> anyhow::Result<Guest> {
        self.how.open(&self.guest, options)
    }
}

impl OpenArguments {
    /// The options that open `guest`.
    pub(crate) fn options(
        &self,
        guest: &str,
        settings: &Settings,
        command: Command<'_>,
    ) -> anyhow::Result<Options> {
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
        let env = self.env()?;
        #[cfg(feature = "linux")]
        {
            let shape = crate::linux::Shape::new(command.arguments, &env, &self.dir, self.linux)?
                .reach(&self.net)
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
            // A name that is not a file is an image, whose program takes lines, or a snapshot, which takes no
            // warm-up.
            let lines = self.is_program() || !std::path::Path::new(guest).is_file();
            options = options.warm(match lines {
                true => Call::bytes("", format!("{call}\n")),
                false => text_call(call),
            });
        }
        #[cfg(feature = "wasm")]
        let options = {
            // A Linux program may also be granted a file.
            let dir: &[String] = if self.is_program() { &[] } else { &self.dir };
            let wasm = self.wasm.options(guest, command, &env, dir)?;
            self.wasm.engine(options).wasm(wasm)
        };
        #[cfg(not(any(feature = "wasm", feature = "linux")))]
        let _ = (command, env);
        #[cfg(not(feature = "wasm"))]
        let _ = guest;
        #[cfg(feature = "vm")]
        let options =
            options.vm(|builder| builder.log(|level, text| eprintln!("guest[{level}]: {text}")));
        Ok(options)
    }

    /// The requested environment.
    pub(crate) fn env(&self) -> anyhow::Result<Vec<(String, String)>> {
        let pair = |pair: &String| {
            let parts =
                pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
            parts.with_context(|| format!("--env {pair}: no `=` in it"))
        };
        self.env.iter().map(pair).collect()
    }

    /// Whether the options declare the guest a Linux program.
    fn is_program(&self) -> bool {
        #[cfg(feature = "linux")]
        return self.linux;
        #[cfg(not(feature = "linux"))]
        false
    }

    /// Opens what is named, and warms it if it is a guest.
    pub(crate) fn open(&self, guest: &str, options: &Options) -> anyhow::Result<Guest> {
        let bar = spinner("opening");
        let guest = afresh::open(&self.reference(guest)?, options)?;
        bar.finish_and_clear();
        Ok(guest)
    }

    /// The reference that `guest` is opened by: a Linux program is looked up in PATH, as in a shell.
    pub(crate) fn reference(&self, guest: &str) -> anyhow::Result<String> {
        #[cfg(feature = "linux")]
        if self.linux {
            return crate::linux::find(guest);
        }
        Ok(guest.to_owned())
    }
}

/// A call as an option names it: `F` or `F:ARG,ARG`.
pub(crate) fn text_call(text: &str) -> Call {
    // The name of an interface contains colons, before the function's.
    let function = text.find('#').unwrap_or(0);
    let (name, texts) = match text[function..].find(':') {
        Some(colon) => (&text[..function + colon], &text[function + colon + 1..]),
        None => (text, ""),
    };
    Call::text(name, texts.split(',').filter(|text| !text.is_empty()))
}
