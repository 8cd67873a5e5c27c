//! How sandboxes are set up.

use std::path::PathBuf;
use std::time::Duration;

use crate::sandbox::{Budgets, Keys};

/// Sandboxes of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SandboxConfig {
    /// The directory that paused sandboxes and snapshots are kept in. It is the server's alone.
    pub dir: PathBuf,
    /// The keys of tenants.
    pub keys: Keys,
    /// Templates of sandboxes. The first is the default for unknown names.
    pub templates: Vec<Template>,
    /// Budgets of tenants and of the whole server.
    pub budgets: Budgets,
    /// Whether `/metrics` and the status page need a key with the scope `metrics` or `admin`.
    pub requires_metrics_key: bool,
    /// Maximum sandboxes of one tenant, paused ones included; in a fleet over all hosts.
    /// [`Limits::sandboxes`] of a tenant precedes it.
    ///
    /// [`Limits::sandboxes`]: crate::sandbox::Limits::sandboxes
    pub max_sandboxes: usize,
    /// Maximum snapshots of one tenant.
    pub max_snapshots: usize,
    /// Maximum calls that run at the same time, of all tenants. One tenant has at most three
    /// quarters of them, and leaves at least a third as many free as it has.
    pub max_running_calls: usize,
    /// Maximum calls that compute at the same time, and one of each tenant beyond them. Calls that
    /// wait do not count, and while processors are idle more run. By default one and a half
    /// times the processors, less one: then a call has two thirds of a processor while another
    /// tenant floods.
    pub max_computing_calls: usize,
    /// Maximum bytes of memory that the server's process and its programs use while a sandbox is
    /// made or comes back from the store. By default three quarters of the limit: the host's memory
    /// or that of the control group. Live sandboxes can grow past it.
    pub max_memory: u64,
    /// The beginnings of the names of images that tenants may build templates of, such as
    /// `docker.io/library/`.
    pub build_images: Vec<String>,
    /// Whether clients reach the server by HTTPS.
    pub https: bool,
    /// Whether programs in sandboxes are reached without a token where their clients do not choose.
    pub public_traffic: bool,
    /// After so long without a call a sandbox is saved, and comes back with the next.
    pub idle_timeout: Duration,
    /// Minimum time between removals of unreferenced objects from the directory.
    pub gc_interval: Duration,
    /// Maximum lifetime in one client request.
    pub timeout: Duration,
    /// Time limit of one piece of code.
    pub call_timeout: Duration,
    /// Maximum CPU time of one piece of code, without its waits. [`Template::cpu_limit`] precedes
    /// it.
    pub cpu_limit: Option<Duration>,
    /// Maximum bytes of one request.
    pub max_body: usize,
}

impl SandboxConfig {
    /// Sandboxes kept in `dir`, with the usual limits, no keys and no templates yet.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            keys: Keys::default(),
            templates: Vec::new(),
            budgets: Budgets::default(),
            requires_metrics_key: false,
            max_sandboxes: 1000,
            max_snapshots: 1000,
            max_running_calls: 64,
            max_computing_calls: crate::sandbox::tenants::cpu_scheduler::default_places(),
            max_memory: crate::sandbox::tenants::memory::default_limit(),
            build_images: Vec::new(),
            https: false,
            public_traffic: false,
            idle_timeout: Duration::from_secs(60),
            gc_interval: Duration::from_secs(60),
            timeout: Duration::from_secs(24 * 60 * 60),
            call_timeout: Duration::from_secs(60),
            cpu_limit: None,
            max_body: 64 << 20,
        }
    }
}

/// A template of sandboxes: a warm guest that runs code.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Template {
    /// Its name for clients.
    pub name: String,
    /// The reference for [`afresh::open`]: a guest's file, or a snapshot.
    pub reference: String,
    /// Whether the reference is a host interpreter that runs as a Linux program, or an OCI image
    /// with one. Its sandboxes also run commands.
    pub linux: bool,
    /// Host directories that a Linux program may read, in addition to the system's programs and
    /// libraries.
    pub dirs: Vec<PathBuf>,
    /// Servers outside that a Linux program may connect to, and rules for requests.
    #[cfg(linux_guests)]
    pub net: Vec<afresh::linux::NetGrant>,
    /// Options of opening it. The server sets its engine, its imports and limits.
    pub open: afresh::Options,
    /// Images that it stands for in builds of templates, as clients name them.
    pub images: Vec<String>,
    /// The language that it evaluates: `javascript` or `python`.
    pub language: String,
    /// Calls of the warm-up, after those that the language needs. A snapshot takes none.
    pub warm: Vec<afresh::Call>,
    /// Code that is run once, before any sandbox is made. A snapshot takes none.
    pub setup: Option<String>,
    /// The language's library, if it is not in the guest's directory.
    pub library: Option<PathBuf>,
    /// Maximum bytes of a memory of one sandbox.
    pub memory: u64,
    /// Maximum bytes of files in one sandbox.
    pub files: u64,
    /// Maximum CPU time of one piece of code, without its waits.
    pub cpu_limit: Option<Duration>,
    /// Any text. Another text makes another template, after changes of contents that no digest
    /// covers: libraries of a host program, and files in [`Template::dirs`].
    pub generation: Option<String>,
}

impl Template {
    /// A template of the guest that `reference` names.
    pub fn new(
        name: impl Into<String>,
        reference: impl Into<String>,
        open: afresh::Options,
    ) -> Self {
        Self {
            name: name.into(),
            reference: reference.into(),
            open,
            images: Vec::new(),
            language: "javascript".to_owned(),
            linux: false,
            dirs: Vec::new(),
            #[cfg(linux_guests)]
            net: Vec::new(),
            warm: Vec::new(),
            setup: None,
            library: None,
            memory: 512 << 20,
            files: 64 << 20,
            cpu_limit: None,
            generation: None,
        }
    }
    /// Whether both make the same sandboxes, given that files of the same name have not changed.
    /// Of [`Template::open`] the caches count alone.
    pub(crate) fn is_equivalent(&self, other: &Self) -> bool {
        let Self {
            name,
            reference,
            linux,
            dirs,
            #[cfg(linux_guests)]
            net,
            open,
            images,
            language,
            warm,
            setup,
            library,
            memory,
            files,
            cpu_limit,
            generation,
        } = self;
        #[cfg(linux_guests)]
        if net.len() != other.net.len()
            || !net.iter().zip(&other.net).all(|(own, other)| own.is_equivalent(other))
        {
            return false;
        }
        (name, reference, linux, dirs, images, language)
            == (
                &other.name,
                &other.reference,
                &other.linux,
                &other.dirs,
                &other.images,
                &other.language,
            )
            && (warm, setup, library, memory, files, cpu_limit, generation)
                == (
                    &other.warm,
                    &other.setup,
                    &other.library,
                    &other.memory,
                    &other.files,
                    &other.cpu_limit,
                    &other.generation,
                )
            && format!("{open:?}") == format!("{:?}", other.open)
    }
}
