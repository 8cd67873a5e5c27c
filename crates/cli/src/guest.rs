//! Options that every command with a guest shares, and loading what they name.

use std::path::PathBuf;
use std::time::Duration;

use afresh_memory::Strategy;
use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, Output, Warm, WarmUp, Wasi};
use anyhow::{Context, bail};
use clap::Args;

use crate::output::spinner;

/// A guest and how to run it.
#[derive(Debug, Args)]
pub(crate) struct GuestArguments {
    /// A Wasm module or component, or a static-PIE ELF for a micro-VM.
    pub(crate) guest: PathBuf,
    /// Exported functions to call once, in order, to warm the guest; arguments after a colon, separated
    /// by commas: `warm:100,2`.
    #[arg(long = "warm", value_name = "F[:ARGS]")]
    pub(crate) warm: Vec<String>,
    /// How instances are kept apart: auto, reset or fresh.
    #[arg(long, default_value = "auto")]
    pub(crate) mode: Mode,
    /// How memory is brought back: auto, full-copy, discard, scan, write-set, write-set-uffd,
    /// write-set-scan, write-set-mprotect.
    #[arg(long, default_value = "auto")]
    pub(crate) strategy: Strategy,
    /// Most milliseconds one call may take.
    #[arg(long, value_name = "MS")]
    pub(crate) timeout: Option<u64>,
    /// Most fuel one call may use.
    #[arg(long)]
    pub(crate) fuel: Option<u64>,
    /// Most MiB one memory of the guest may grow to; for a micro-VM, its memory.
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// Environment variables for the guest.
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Host directories the guest may read, as HOST or HOST::GUEST; add `:rw` to let it write.
    #[arg(long, value_name = "HOST[::GUEST][:rw]")]
    pub(crate) dir: Vec<String>,
    /// Where compiled modules are kept between runs. Its files are native code: it must be yours alone.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
}

/// What the file holds.
pub(crate) enum Kind {
    Module(Vec<u8>),
    Component(Vec<u8>),
    Elf(Vec<u8>),
}

impl GuestArguments {
    /// Reads the file and looks what it is.
    pub(crate) fn read(&self) -> anyhow::Result<Kind> {
        let bytes = std::fs::read(&self.guest)
            .with_context(|| format!("cannot read {}", self.guest.display()))?;
        if bytes.starts_with(b"\x7fELF") {
            return Ok(Kind::Elf(bytes));
        }
        if bytes.starts_with(b"\0asm") {
            let component = bytes.get(6..8) == Some(&[1, 0]);
            return Ok(if component { Kind::Component(bytes) } else { Kind::Module(bytes) });
        }
        bail!(
            "{} is neither a Wasm binary nor an ELF executable (text-format Wasm must be assembled first)",
            self.guest.display()
        )
    }

    fn wasi(&self, output: Output) -> anyhow::Result<Wasi> {
        let mut wasi = Wasi { output, ..Wasi::default() };
        wasi.args = vec![self.guest.display().to_string()];
        for pair in &self.env {
            let (name, value) =
                pair.split_once('=').with_context(|| format!("--env {pair}: no `=` in it"))?;
            wasi.env.push((name.to_owned(), value.to_owned()));
        }
        for entry in &self.dir {
            let (entry, writable) = match entry.strip_suffix(":rw") {
                Some(entry) => (entry, true),
                None => (entry.as_str(), false),
            };
            let (host, guest) = entry.split_once("::").unwrap_or((entry, entry));
            anyhow::ensure!(PathBuf::from(host).is_dir(), "--dir {host}: no such directory");
            wasi.dirs.push((host.into(), guest.to_owned(), writable));
        }
        Ok(wasi)
    }

    fn engine(&self) -> anyhow::Result<Engine> {
        Ok(Engine::new(EngineConfig {
            timeouts: self.timeout.is_some(),
            fuel: self.fuel.is_some(),
            cache: self.cache.clone(),
            ..EngineConfig::default()
        })?)
    }

    fn options(&self, output: Output) -> anyhow::Result<GuestOptions> {
        Ok(GuestOptions {
            mode: self.mode,
            strategy: self.strategy,
            timeout: self.timeout.map(Duration::from_millis),
            fuel: self.fuel,
            memory_limit: self
                .memory
                .map_or(usize::MAX, |mib| usize::try_from(mib << 20).unwrap_or(usize::MAX)),
            wasi: self.wasi(output)?,
            ..GuestOptions::default()
        })
    }

    /// Loads and warms a core module.
    pub(crate) fn warm(&self, wasm: &[u8], output: Output) -> anyhow::Result<Warm> {
        let engine = self.engine()?;
        let guest = Guest::with_options(&engine, wasm, self.options(output)?)?;
        let bar = spinner("compiling and warming");
        let mut warm_up = WarmUp::new();
        for call in &self.warm {
            let (name, texts) = call.split_once(':').unwrap_or((call, ""));
            let texts: Vec<String> =
                texts.split(',').filter(|t| !t.is_empty()).map(str::to_owned).collect();
            warm_up = warm_up.call_text(name, &texts);
        }
        let warm = guest.warm(warm_up)?;
        bar.finish_and_clear();
        Ok(warm)
    }

    /// Loads a component.
    pub(crate) fn component(
        &self,
        wasm: &[u8],
        output: Output,
    ) -> anyhow::Result<afresh_wasm::WarmComponent> {
        anyhow::ensure!(
            self.warm.is_empty(),
            "components run from their state after instantiation; --warm is for core modules"
        );
        let engine = self.engine()?;
        let guest = Guest::with_options(&engine, wasm, self.options(output)?)?;
        let bar = spinner("compiling");
        let warm = guest.warm_component()?;
        bar.finish_and_clear();
        Ok(warm)
    }

    /// Boots a micro-VM.
    pub(crate) fn sandbox(&self, elf: &[u8]) -> anyhow::Result<afresh_vm::Sandbox> {
        let mut builder = afresh_vm::Sandbox::builder().memory(self.memory.unwrap_or(64) << 20);
        if let Some(timeout) = self.timeout {
            builder = builder.timeout(Duration::from_millis(timeout));
        }
        builder = builder.log(|level, text| eprintln!("guest[{level}]: {text}"));
        Ok(builder.build(elf)?)
    }
}
