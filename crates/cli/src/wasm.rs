//! Options of Wasm guests.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use afresh::Options;
use afresh::files::{Budget, Layer, LayerLimits, Tree};
use afresh::memory::Strategy;
use afresh::wasm::{GuestOptions, Mode, Output, Wasi};
use anyhow::Context;
use clap::Args;

use crate::guest::{Command, text};

/// Options of a Wasm guest.
#[derive(Debug, Args)]
pub(crate) struct WasmArguments {
    /// Isolation of calls: auto, reset or fresh [default: auto, and fresh behind HTTP].
    #[arg(long)]
    pub(crate) mode: Option<Mode>,
    /// Reset strategy of memory: auto, full-copy, discard, reprotect, write-set, write-set-uffd,
    /// write-set-scan or write-set-mprotect.
    #[arg(long, default_value = "auto")]
    strategy: Strategy,
    /// Maximum fuel of a call.
    #[arg(long)]
    fuel: Option<u64>,
    /// Maximum native stack of the guest, in MiB, for deep recursion [default: the build's own
    /// value, or 512 KiB].
    #[arg(long, value_name = "MIB")]
    stack: Option<usize>,
    /// Mount a directory, zip, tar or OCI layout as a read-only layer of a file tree in memory, at
    /// GUEST.
    ///
    /// May be repeated to stack layers. Writes are reset and saved with the memory. `empty` is an
    /// empty tree.
    #[arg(long, value_name = "PATH[::GUEST]", conflicts_with = "dir")]
    files: Vec<String>,
    /// Maximum data written to the file tree, in MiB [default: 64].
    #[arg(long, value_name = "MIB", requires = "files")]
    files_memory: Option<u64>,
    /// Maximum number of files, directories and links created or changed in the file tree [default:
    /// 65536].
    #[arg(long, value_name = "COUNT", requires = "files")]
    files_count: Option<u64>,
    /// Load a guest with unresolved imports.
    ///
    /// A call of one of them fails.
    #[arg(long)]
    stub_imports: bool,
}

impl WasmArguments {
    /// The options of the engine.
    pub(crate) fn engine(&self, options: Options) -> Options {
        match self.stack {
            Some(mib) => options.stack(mib.saturating_mul(1 << 20)),
            None => options,
        }
    }

    pub(crate) fn options(
        &self,
        guest: &OsStr,
        command: Command<'_>,
        env: &[(OsString, OsString)],
        dir: &[OsString],
    ) -> anyhow::Result<GuestOptions> {
        Ok(GuestOptions {
            mode: self.mode.unwrap_or_default(),
            strategy: self.strategy,
            fuel: self.fuel,
            wasi: Wasi { files: self.tree()?, ..wasi(guest, command, env, dir)? },
            stub_imports: self.stub_imports,
            ..GuestOptions::default()
        })
    }

    /// The guest's file tree, if --files is given.
    fn tree(&self) -> anyhow::Result<Option<Tree>> {
        if self.files.is_empty() {
            return Ok(None);
        }
        let usual = Budget::default();
        let mut tree = Tree::new(Budget {
            bytes: self.files_memory.map_or(usual.bytes, |mib| mib.saturating_mul(1 << 20)),
            files: self.files_count.unwrap_or(usual.files),
        });
        for entry in self.files.iter().filter(|entry| *entry != "empty") {
            let (path, guest) = entry.split_once("::").unwrap_or((entry, "/"));
            let layer = Layer::open(path, &LayerLimits::default())
                .with_context(|| format!("--files {entry}"))?;
            tree = tree.with_layer(guest, &layer).with_context(|| format!("--files {entry}"))?;
        }
        Ok(Some(tree))
    }
}

fn wasi(
    guest: &OsStr,
    command: Command<'_>,
    env: &[(OsString, OsString)],
    dir: &[OsString],
) -> anyhow::Result<Wasi> {
    let output = if command.shown { Output::Inherit } else { Output::Discard };
    let mut wasi = Wasi { output, ..Wasi::default() };
    for (name, value) in env {
        wasi.env.push((text(name, "--env")?.to_owned(), text(value, "--env")?.to_owned()));
    }
    wasi.args.push(guest.to_string_lossy().into_owned());
    for argument in command.arguments {
        wasi.args.push(text(argument, "the argument")?.to_owned());
    }
    wasi.inherit_stdin = command.interactive && command.input.is_none();
    wasi.stdin = command.input.unwrap_or_default();
    for entry in dir {
        let entry = text(entry, "--dir")?;
        let (entry, writable) = match entry.strip_suffix(":rw") {
            Some(entry) => (entry, true),
            None => (entry, false),
        };
        let (host, guest) = entry.split_once("::").unwrap_or((entry, entry));
        anyhow::ensure!(PathBuf::from(host).is_dir(), "--dir {host}: no such directory");
        wasi.dirs.push((host.into(), guest.to_owned(), writable));
    }
    Ok(wasi)
}
