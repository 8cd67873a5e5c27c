//! Options that every command with a guest shares.

use std::path::PathBuf;
use std::time::Duration;

use afresh::{Call, Guest, Options};
use clap::Args;

use crate::Settings;
use crate::output::spinner;

/// A guest and how to run it.
#[derive(Debug, Args)]
pub(crate) struct GuestArguments {
    /// A Wasm module or component, a static-PIE ELF for a micro-VM, or a snapshot: PLACE[@NAME].
    pub(crate) guest: String,
    #[command(flatten)]
    how: OpenArguments,
}

/// How guests are run.
#[derive(Debug, Args)]
pub(crate) struct OpenArguments {
    /// Exported functions to call once, in order, to warm the guest; arguments after a colon, separated
    /// by commas: `warm:100,2`.
    #[arg(long = "warm", value_name = "F[:ARGS]")]
    warm: Vec<String>,
    /// Most milliseconds one call may take.
    #[arg(long, value_name = "MS")]
    pub(crate) timeout: Option<u64>,
    /// Most MiB one memory of the guest may grow to; for a micro-VM, its memory.
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// Where compiled guests are kept between runs. Its files are native code: it must be yours alone.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    #[cfg(feature = "wasm")]
    #[command(flatten)]
    pub(crate) wasm: crate::wasm::WasmArguments,
}

/// What a guest that runs a WASI command is given, and where its output goes.
#[derive(Debug, Default)]
pub(crate) struct Command<'a> {
    /// Its arguments, after its name.
    pub(crate) arguments: &'a [String],
    /// Its standard input; this process's own where there is none and `interactive` says so.
    pub(crate) input: Option<Vec<u8>>,
    pub(crate) interactive: bool,
    /// Whether what it writes is shown.
    pub(crate) shown: bool,
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

    /// Opens what is named, and warms it if it is a guest.
    pub(crate) fn open(&self, options: &Options) -> anyhow::Result<Guest> {
        let bar = spinner("opening");
        let guest = afresh::open(&self.guest, options)?;
        bar.finish_and_clear();
        Ok(guest)
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
        for call in &self.warm {
            options = options.warm(text_call(call));
        }
        #[cfg(feature = "wasm")]
        let options = self.wasm.engine(options).wasm(self.wasm.options(guest, command)?);
        #[cfg(not(feature = "wasm"))]
        let _ = (guest, command);
        #[cfg(feature = "vm")]
        let options =
            options.vm(|builder| builder.log(|level, text| eprintln!("guest[{level}]: {text}")));
        Ok(options)
    }
}

/// A call as an option names it: `F` or `F:ARG,ARG`.
pub(crate) fn text_call(text: &str) -> Call {
    // The name of an interface has colons of its own, before the function's.
    let function = text.find('#').unwrap_or(0);
    let (name, texts) = match text[function..].find(':') {
        Some(colon) => (&text[..function + colon], &text[function + colon + 1..]),
        None => (text, ""),
    };
    Call::text(name, texts.split(',').filter(|text| !text.is_empty()))
}
