//! Options that every command with a guest shares, and opening what they name: a guest, which is warmed,
//! or a snapshot of a warm one.

use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use afresh_memory::Strategy;
use afresh_pager::{Options, SnapshotMemory};
use afresh_store::Snapshot;
use afresh_vm::{Sandbox, SandboxBuilder};
use afresh_wasm::{
    Engine, EngineConfig, Frozen, Guest, GuestOptions, Mode, Output, Warm, WarmComponent, WarmUp,
    Wasi,
};
use anyhow::{Context, bail};
use clap::Args;

use crate::output::spinner;
use crate::place::{Place, Reference};

/// A guest and how to run it.
#[derive(Debug, Args)]
pub(crate) struct GuestArguments {
    /// A Wasm module or component, a static-PIE ELF for a micro-VM, or a snapshot: PLACE[@NAME].
    pub(crate) guest: String,
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

/// Whether the file is a tar archive, as a snapshot in a single file is.
fn is_archive(path: &str) -> anyhow::Result<bool> {
    let mut start = Vec::new();
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {path}"))?;
    file.take(512).read_to_end(&mut start).with_context(|| format!("cannot read {path}"))?;
    Ok(start.get(257..262) == Some(b"ustar"))
}

/// A guest that is ready to be called.
pub(crate) enum Ready {
    Module(Warm),
    Component(WarmComponent),
    Sandbox(Box<Sandbox>),
}

/// A guest and where it came from.
pub(crate) struct Opened {
    pub(crate) ready: Ready,
    /// Of a guest out of a snapshot.
    pub(crate) thawed: Option<Thawed>,
}

/// A guest out of a snapshot.
pub(crate) struct Thawed {
    pub(crate) reference: Reference,
    pub(crate) snapshot: Snapshot,
    pub(crate) memory: SnapshotMemory,
    /// Time from the first look at the place to a guest that can be called.
    pub(crate) took: Duration,
}

impl Thawed {
    /// Says what the snapshot took.
    pub(crate) fn report(&self) {
        let pages = self.snapshot.pages();
        eprintln!(
            "snapshot  {} opened in {:.1?}; {} faults fetched pages, {} of {pages} pages are there",
            self.reference,
            self.took,
            self.memory.faults(),
            if self.memory.pages().is_complete() {
                pages
            } else {
                self.memory.touched().iter().map(|run| run.len).sum()
            },
        );
    }
}

impl GuestArguments {
    /// Opens what is named, and warms it if it is a guest.
    pub(crate) fn open(&self, output: Output) -> anyhow::Result<Opened> {
        if let Some(reference) = self.reference()? {
            return self.thaw(reference, output);
        }
        let bytes =
            std::fs::read(&self.guest).with_context(|| format!("cannot read {}", self.guest))?;
        let ready = if bytes.starts_with(b"\x7fELF") {
            Ready::Sandbox(Box::new(self.sandbox(&bytes)?))
        } else if !bytes.starts_with(b"\0asm") {
            bail!(
                "{} is neither a Wasm binary nor an ELF executable nor a snapshot (text-format Wasm must \
                 be assembled first)",
                self.guest
            )
        } else if bytes.get(6..8) == Some(&[1, 0]) {
            Ready::Component(self.component(&bytes, output)?)
        } else {
            Ready::Module(self.warm(&bytes, output)?)
        };
        Ok(Opened { ready, thawed: None })
    }

    /// The snapshot that is meant, unless a guest is.
    fn reference(&self) -> anyhow::Result<Option<Reference>> {
        if std::path::Path::new(&self.guest).is_file() && !is_archive(&self.guest)? {
            return Ok(None);
        }
        let reference: Reference =
            self.guest.parse().map_err(|why| anyhow::anyhow!("{}: {why}", self.guest))?;
        let there = match &reference.place {
            Place::Remote(_) => true,
            Place::Store(path) => path.is_dir(),
            Place::File(path) => path.is_file(),
        };
        Ok(there.then_some(reference))
    }

    fn thaw(&self, reference: Reference, output: Output) -> anyhow::Result<Opened> {
        anyhow::ensure!(
            self.warm.is_empty(),
            "{reference} is a snapshot of a warm guest; --warm is for guests that are not"
        );
        let started = Instant::now();
        let pages = self.cache.as_ref().map(|cache| cache.join("pages"));
        let snapshot = reference.load(pages.as_deref())?;
        let (ready, memory) = match snapshot.guest().kind.as_str() {
            "wasm" => {
                let frozen = Frozen::load(snapshot.clone(), &Options::default())?;
                (Ready::Module(self.thaw_module(&frozen, output)?), frozen.memory().clone())
            }
            "vm" => {
                let frozen = afresh_vm::Frozen::load(snapshot.clone(), &Options::default())?;
                let sandbox = Box::new(self.thaw_sandbox(&frozen)?);
                (Ready::Sandbox(sandbox), frozen.memory().clone())
            }
            other => {
                bail!("{reference} holds memory of kind `{other}`, which this command cannot run")
            }
        };
        let took = started.elapsed();
        Ok(Opened { ready, thawed: Some(Thawed { reference, snapshot, memory, took }) })
    }

    /// A warm guest out of a frozen one.
    pub(crate) fn thaw_module(&self, frozen: &Frozen, output: Output) -> anyhow::Result<Warm> {
        Ok(Warm::thaw(&self.engine()?, &self.options(output)?, frozen)?)
    }

    fn wasi(&self, output: Output) -> anyhow::Result<Wasi> {
        let mut wasi = Wasi { output, ..Wasi::default() };
        wasi.args = vec![self.guest.clone()];
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
    fn warm(&self, wasm: &[u8], output: Output) -> anyhow::Result<Warm> {
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
    fn component(&self, wasm: &[u8], output: Output) -> anyhow::Result<WarmComponent> {
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
    fn sandbox(&self, elf: &[u8]) -> anyhow::Result<Sandbox> {
        Ok(self.builder().memory(self.memory.unwrap_or(64) << 20).build(elf)?)
    }

    /// A micro-VM out of a frozen one.
    pub(crate) fn thaw_sandbox(&self, frozen: &afresh_vm::Frozen) -> anyhow::Result<Sandbox> {
        Ok(self.builder().thaw(frozen)?)
    }

    /// What a micro-VM gets from this host, booted or thawed.
    fn builder(&self) -> SandboxBuilder {
        let builder = Sandbox::builder().log(|level, text| eprintln!("guest[{level}]: {text}"));
        match self.timeout {
            Some(timeout) => builder.timeout(Duration::from_millis(timeout)),
            None => builder,
        }
    }
}
