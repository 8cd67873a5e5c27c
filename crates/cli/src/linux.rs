//! Options of Linux programs: arguments, environment, directories.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::linux::{ConnectionLog, NetGrant, Program};
use anyhow::Context;
use rustix::fs::{Access, access};

use crate::net::NetArguments;

/// The path on the host of `HOST[::GUEST][:rw]`.
fn host_path(entry: &OsStr) -> &Path {
    let bytes = entry.as_bytes();
    let host = bytes.strip_suffix(b":rw").unwrap_or(bytes);
    let end = host.windows(2).position(|pair| pair == b"::").unwrap_or(host.len());
    Path::new(OsStr::from_bytes(&host[..end]))
}

/// The options of a program.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    arguments: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    granted: Vec<PathBuf>,
    directory: Option<PathBuf>,
    reaches: Vec<NetGrant>,
    log: Option<ConnectionLog>,
    replaced: bool,
}

impl Shape {
    /// With `only` Linux programs, `--dir` entries in the form for Wasm guests are refused.
    pub(crate) fn new(
        arguments: &[OsString],
        env: &[(OsString, OsString)],
        dir: &[OsString],
        only: bool,
    ) -> anyhow::Result<Self> {
        let here = std::env::current_dir().and_then(std::fs::canonicalize).unwrap_or_default();
        let (mut granted, mut directory) = (Vec::new(), None);
        for entry in dir {
            let host = host_path(entry);
            anyhow::ensure!(
                !only || host == entry.as_os_str(),
                "--dir {}: a Linux program gets a directory at its own path, read-only; use --dir {}",
                entry.display(),
                host.display()
            );
            let path = host.canonicalize();
            let path = path.with_context(|| format!("--dir {}", host.display()))?;
            // It would be granted without its content.
            access(&path, Access::READ_OK).with_context(|| format!("--dir {}", host.display()))?;
            // Relative paths in arguments resolve here if the program has access.
            if here.starts_with(&path) {
                directory = Some(here.clone());
            }
            granted.push(path);
        }
        Ok(Self {
            arguments: arguments.to_vec(),
            env: env.to_vec(),
            granted,
            directory,
            reaches: Vec::new(),
            log: None,
            replaced: false,
        })
    }

    /// Whether the program may read a host path.
    pub(crate) fn grants(&self, path: &Path) -> bool {
        self.granted.iter().any(|granted| path.starts_with(granted))
    }

    /// Allows and logs connections.
    pub(crate) fn reach(self, net: &NetArguments) -> anyhow::Result<Self> {
        Ok(Self { reaches: net.grants()?, log: net.log()?, ..self })
    }

    /// Grants these host directories, too.
    pub(crate) fn grant(mut self, folders: Vec<PathBuf>) -> Self {
        self.granted.extend(folders);
        self
    }

    /// Ends the process at every reset if `replaced` is set.
    pub(crate) fn replace_processes(self, replaced: bool) -> Self {
        Self { replaced, ..self }
    }

    pub(crate) fn apply(&self, program: Program) -> Program {
        let mut program = program.replace_processes(self.replaced);
        for argument in &self.arguments {
            program = program.arg(argument);
        }
        for (name, value) in &self.env {
            program = program.env(name, value);
        }
        for path in &self.granted {
            program = program.grant(path);
        }
        for destination in &self.reaches {
            program = program.reach(destination.clone());
        }
        if let Some(log) = &self.log {
            program = program.log_connections(log.clone());
        }
        match &self.directory {
            Some(directory) => program.directory(directory),
            None => program,
        }
    }
}
