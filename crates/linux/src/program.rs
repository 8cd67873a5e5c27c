//! A program to be warmed, with its arguments, grants and limits.

mod egress;
mod start_directory;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_egress::{ConnectionLog, NetGrant};
use afresh_files::{LayerError, OciImage, Refused, Time};
use afresh_sys::planted;

use crate::base::{self, Root};
use crate::caller_settings::CallerSettings;
use crate::error::WarmError;
use crate::frozen_state::{FrozenKernel, IdleWait};
use crate::guest::{Guest, StopReason, after};
use crate::limits::{Limits, POLL_INTERVAL, StopHandle};
use crate::platform::{ANSWERS_INSIDE, PlatformError, Process, StubCommands};
use crate::sentry::{
    self, FIRST, InputSource, Kernel, Layout, MAX_RESERVED, OpenerGrants, Resource, Sentry,
};
use crate::subprocess::Subprocess;
use crate::subprocesses::ParkedSubprocesses;
use crate::warm::Warm;
use crate::{http, load, trust};

/// Host files that every guest may read: programs and libraries, their search paths, and data that
/// is the same on every host.
const SYSTEM: [&str; 15] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];

/// A Linux program, its arguments, the files it may see and its limits.
///
/// It is started by [`Program::warm`] and runs until all of its threads wait, and it waits for
/// input on descriptor 0 or listens on a port: that is the state that every call starts from. It
/// has no network except its own loopback and the servers that it may [reach](Program::reach). It
/// may have up to 255 processes in addition to its first; they are part of that state, and their
/// memory counts together. It sees the host's system programs and libraries and the granted files,
/// all read-only, and keeps its own files in memory.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    root: Option<Root>,
    /// The first argument, where that is not the path.
    name: Option<OsString>,
    /// The state whose files it has.
    files_of: Option<Arc<FrozenKernel>>,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    granted: Vec<PathBuf>,
    files: Vec<(PathBuf, Vec<u8>)>,
    requests: Vec<Vec<u8>>,
    reaches: Vec<NetGrant>,
    connections: Option<ConnectionLog>,
    directory: PathBuf,
    inherited: CallerSettings,
    /// User and group, if they are set.
    user: Option<[u32; 2]>,
    /// Whether a missing directory is made.
    makes_directory: bool,
    /// Whether it starts in `/` where that fails.
    prefers_directory: bool,
    memory: u64,
    storage: u64,
    output: usize,
    time: Duration,
    slice: Option<Duration>,
    poll: Duration,
    replaced: bool,
    answers_inside: bool,
    limits: Vec<(Resource, u64, u64)>,
    pub(crate) start: Duration,
    /// Stops the warm-up.
    stop: Option<StopHandle>,
}

/// Settings of Java's runtimes, where a distribution stores them apart from the rest. None starts
/// without them.
fn java_settings() -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir("/etc").into_iter().flatten().flatten();
    let is_java = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"java-")) && path.is_dir()
    };
    let mut found: Vec<_> = entries.map(|entry| entry.path()).filter(is_java).collect();
    found.sort();
    found.into_iter()
}

/// Finds the file that a shell would run for a word: the first of that name in the directories of
/// `PATH`.
#[must_use]
pub fn find_in_path(word: impl AsRef<OsStr>) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&folders).map(|folder| folder.join(word.as_ref()));
    files.find(|file| file.is_file())
}

/// Whether all programs answer calls inside. Only tests of this workspace can demand it.
fn tests_answer_inside() -> bool {
    ANSWERS_INSIDE && planted::ENABLED && std::env::var_os("AFRESH_ANSWER_INSIDE").is_some()
}

impl Program {
    /// The program at `path`: an absolute host path, or that of a file given by [`Program::file`].
    /// The file is an ELF file for the processor of the host, static or dynamic, or an executable
    /// script whose interpreter it may read.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            root: None,
            name: None,
            files_of: None,
            args: Vec::new(),
            env: Vec::new(),
            granted: Vec::new(),
            files: Vec::new(),
            requests: Vec::new(),
            reaches: Vec::new(),
            connections: None,
            directory: PathBuf::from("/"),
            inherited: CallerSettings::default(),
            user: None,
            makes_directory: false,
            prefers_directory: false,
            memory: 1 << 30,
            storage: 256 << 20,
            output: 64 << 20,
            time: Duration::from_secs(10),
            slice: None,
            poll: POLL_INTERVAL,
            replaced: false,
            answers_inside: tests_answer_inside(),
            limits: Vec::new(),
            start: Duration::from_secs(60),
            stop: None,
        }
    }

    /// The program of an OCI image, from its configuration: its entry point, environment and
    /// directory. Its root is the image's layers. It sees only [granted](Program::grant) host
    /// files: not the host's system programs and libraries. Arguments replace those after the
    /// image's entry point, as for containers. Without an entry point, the first one is the
    /// program. Snapshots contain the layers.
    ///
    /// # Errors
    /// [`LayerError`] for layers with invalid names.
    pub fn of_image(image: &OciImage) -> Result<Self, LayerError> {
        let config = image.config();
        let mut program = Self::new("");
        program.root = Some(Root::new(image)?);
        for (name, value) in &config.env {
            program = program.env(name, value);
        }
        Ok(program.directory(Path::new("/").join(&config.directory)))
    }

    /// A program with the files of another one that is warm or has ended: those of its image or its
    /// grants, and its written files. The first argument is the program. [`Program::grant`],
    /// [`Program::file`] and [`Program::storage_limit`] have no effect, because those of the other
    /// program apply.
    #[must_use]
    pub fn with_files_of(warm: &Warm) -> Self {
        Self { files_of: Some(Arc::clone(&warm.standing.rest)), ..Self::new("") }
    }

    /// Sets the first argument (`argv[0]`). The default is the path.
    #[must_use]
    pub fn name(mut self, name: impl AsRef<OsStr>) -> Self {
        self.name = Some(name.as_ref().to_os_string());
        self
    }

    /// The program of an image and its first arguments, in place of the entry point. No effect
    /// without an image.
    #[must_use]
    pub fn entry_point(mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        if let Some(root) = &mut self.root {
            root.start_with(words.into_iter().map(|word| word.as_ref().to_os_string()).collect());
        }
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_os_string());
        self
    }

    /// Sets a variable of the environment, which is otherwise empty, or that of the image.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let (name, value) = (name.as_ref().to_os_string(), value.as_ref().to_os_string());
        match self.env.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.env.push((name, value)),
        }
        self
    }

    /// The value of a variable of its environment or that of its image.
    #[must_use]
    pub fn variable(&self, name: impl AsRef<OsStr>) -> Option<&OsStr> {
        let found = self.env.iter().find(|(known, _)| known == name.as_ref());
        found.map(|(_, value)| value.as_os_str())
    }

    /// The search path `usual`, preceded by the directory of a host program if it lacks that, so
    /// that programs which it starts are of the same installation.
    #[must_use]
    pub fn search_path(&self, usual: &str) -> String {
        match self.root.is_none() && self.path.is_absolute() {
            true => crate::host_program::search_path(&self.path, usual),
            false => usual.to_owned(),
        }
    }

    /// Grants the guest the host file or directory at the absolute `path`, and everything below it,
    /// for reading.
    ///
    /// The files must not change while guests are warm, because an open file is read again in every
    /// call.
    #[must_use]
    pub fn grant(mut self, path: impl Into<PathBuf>) -> Self {
        self.granted.push(path.into());
        self
    }

    /// Gives the guest a separate file at the absolute `path`.
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((path.into(), bytes.into()));
        self
    }

    /// Adds a warm-up request, which the program answers before it is frozen, so that one-time work
    /// is done. The answer is dropped. Empty bytes are the end of the input. For a server, `GET
    /// /path` is short for a whole request.
    #[must_use]
    pub fn request(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.requests.push(bytes.into());
        self
    }

    /// The directory in which the program starts. The default is `/`, or that of the image, which
    /// is made if it is missing.
    #[must_use]
    pub fn directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.directory = path.into();
        self
    }

    /// The user and group of the guest, who own its files. The default is 1000, or those of the
    /// state whose files it [has](Program::with_files_of). User 0 bypasses permission bits in the
    /// guest, and may give files to others. The numbers exist in the guest only, and give no rights
    /// over the host. `u32::MAX` is not a user.
    #[must_use]
    pub fn user(mut self, user: u32, group: u32) -> Self {
        self.user = Some([user, group].map(|number| number.min(u32::MAX - 1)));
        self
    }

    /// Starts the program with settings of the process that starts it.
    #[must_use]
    pub fn inherit(mut self, settings: CallerSettings) -> Self {
        self.inherited = settings;
        self
    }

    /// The user and group of the state whose files it has. It keeps them unless it gets
    /// [others](Program::user).
    #[must_use]
    pub fn user_of_state(&self) -> Option<[u32; 2]> {
        self.files_of.as_ref().map(|frozen| frozen.state.user())
    }

    /// Maximum bytes of mapped memory, beyond which `ENOMEM` is returned. The default is 1 GiB, and
    /// the maximum 960 GiB. Reserved addresses (`PROT_NONE`) do not count. Of a mapping of 64 MiB
    /// or more with `MAP_NORESERVE`, the touched blocks count.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets whether some system calls are answered inside the process of the guest (off by
    /// default): those for PIDs and users, those on open files that are only read, and those for
    /// actions of signals. The text of programs and libraries then has other bytes in memory at its
    /// system calls.
    #[must_use]
    pub fn answer_inside(mut self, answers: bool) -> Self {
        self.answers_inside = answers && ANSWERS_INSIDE;
        self
    }

    /// Maximum bytes of written files, beyond which `ENOSPC` is returned. The default is 256 MiB.
    #[must_use]
    pub fn storage_limit(mut self, bytes: u64) -> Self {
        self.storage = bytes;
        self
    }

    /// Sets a soft and hard limit for the start of the program, as `ulimit` does. By default it may
    /// have 1024 open descriptors, which it can raise to 65,536, and 4096 threads in 256 processes.
    /// Larger values than the maximum of a guest count as the maximum.
    #[must_use]
    pub fn limit(mut self, resource: Resource, soft: u64, hard: u64) -> Self {
        self.limits.push((resource, soft, hard));
        self
    }

    /// Maximum bytes of output of a call, which ends beyond that. The default is 64 MiB.
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output = bytes;
        self
    }

    /// Time limit of a call. The default is 10 seconds.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time = limit;
        self
    }

    /// Time for which a [streamed](crate::Instance::call_streaming) call continues after its
    /// answer, for background work. Without a slice it continues until all threads wait.
    #[must_use]
    pub fn slice(mut self, length: Duration) -> Self {
        self.slice = Some(length);
        self
    }

    /// Maximum time between two checks whether a [streamed](crate::Instance::call_streaming) call
    /// may continue. The default is 100 ms. Shorter intervals interrupt a computing program more
    /// often.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll = interval;
        self
    }

    /// Makes every reset end the program's process, so that the next call has a new one. By default
    /// the process is kept, and its pages are reset. In a kept process the time of a write reveals
    /// which pages earlier calls have written. In a new process the time of an access reveals which
    /// pages two earlier first calls have touched. With this setting a new process reveals neither.
    /// It costs a fork, and a fault for each page that a call touches.
    #[must_use]
    pub fn replace_processes(mut self, replaced: bool) -> Self {
        self.replaced = replaced;
        self
    }

    /// Time limit of the warm-up. The default is a minute.
    #[must_use]
    pub fn start_limit(mut self, limit: Duration) -> Self {
        self.start = limit;
        self
    }

    /// Lets `handle` stop the warm-up from another thread, within 100 ms. [`Program::warm`] then
    /// fails with [`WarmError::Stopped`].
    #[must_use]
    pub fn stop_handle(mut self, handle: StopHandle) -> Self {
        self.stop = Some(handle);
        self
    }

    /// Limits and grants for a guest out of a snapshot. The program's own file is not granted: the
    /// snapshot contains it, and the path may be any.
    pub(crate) fn opener(&self) -> OpenerGrants {
        let granted = self.granted_with(None);
        let storage = sentry::thawed_budget(self.storage_with_given(), &granted);
        OpenerGrants { granted, memory: self.memory.min(MAX_RESERVED), storage }
    }

    /// Bytes of files that it may have. Its initial files do not count against its storage.
    fn storage_with_given(&self) -> u64 {
        let given: u64 = self.files.iter().map(|(_, bytes)| bytes.len() as u64 + (1 << 12)).sum();
        let bundles = if self.reaches.is_empty() { 0 } else { trust::BUNDLE_STORAGE };
        self.storage.saturating_add(given).saturating_add(bundles)
    }

    /// Host paths that the guest may read at its start, with its own program.
    fn granted_with(&self, own: Option<&Path>) -> Vec<PathBuf> {
        let system = SYSTEM.iter().map(PathBuf::from).chain(java_settings());
        let own = own.map(Path::to_path_buf);
        by_all_names(system.chain(self.granted.iter().cloned()).chain(own).collect())
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            output: self.output,
            time: self.time,
            slice: self.slice,
            poll: self.poll,
            replaced: self.replaced,
            answers_inside: self.answers_inside,
            egress: self.egress(),
            ..Limits::default()
        }
    }

    /// The path of the program, and its arguments with its own name first.
    fn command_line(&self) -> Result<(PathBuf, Vec<OsString>), WarmError> {
        let (tree, args) = match (&self.files_of, &self.root) {
            (Some(rest), _) => (&rest.state.tree, self.args.clone()),
            (None, Some(root)) => (root.base.tree(), root.command(&self.args)),
            (None, None) => {
                let name = self.name.clone().unwrap_or_else(|| self.path.clone().into_os_string());
                return Ok((self.path.clone(), [&[name], &self.args[..]].concat()));
            }
        };
        let word = args.first().ok_or(WarmError::NoProgram)?;
        let found = base::find_program(tree, word, &self.directory, self.variable("PATH"));
        Ok((found.ok_or_else(|| WarmError::NotFound(word.into()))?, args))
    }

    /// The kernel state of its start, with its own files.
    fn kernel(&self, path: &Path) -> Result<Kernel, WarmError> {
        let unfit = |path: &Path| {
            let path = path.to_path_buf();
            move |error: Refused| WarmError::File { path, error }
        };
        let storage = self.storage_with_given();
        let base = self.root.as_ref().map(|root| root.base.clone());
        let granted = match &base {
            None => self.granted_with(Some(path)),
            Some(_) => by_all_names(self.granted.clone()),
        };
        let below = base::over(base.as_ref());
        let (mut tree, layers) = sentry::prepare(below, &granted, storage).map_err(unfit(path))?;
        let memory = self.memory.min(MAX_RESERVED);
        sentry::write_system_files(&mut tree, memory).map_err(unfit(Path::new("/proc")))?;
        let user = self.user.unwrap_or(sentry::DEFAULT_OWNER);
        sentry::settle(&mut tree, base.is_none(), user).map_err(unfit(Path::new("/etc")))?;
        // Files of the host have no authorities of earlier rules.
        if base.is_some() || !self.egress().certificates().is_empty() {
            self.write_trust(&mut tree)?;
        }
        for (path, bytes) in &self.files {
            let written = tree.write_path(sentry::bytes(path), bytes, Time::default());
            written.map_err(unfit(path))?;
        }
        let at = self.start_directory(&mut tree, base.is_some())?;
        let mut state = Kernel::new(Layout::new(memory), tree, base, layers).owned_by(user);
        state.enter(at).map_err(unfit(&self.directory))?;
        Ok(state)
    }

    /// The kernel state of its start, with the files of `other`.
    fn kernel_with_files(&self, other: &Kernel) -> Result<Kernel, WarmError> {
        let unfit = |error| WarmError::File { path: self.directory.clone(), error };
        let layout = Layout::new(self.memory.min(MAX_RESERVED));
        let mut state = other.with_files(layout, self.user);
        let at = self.start_directory(&mut state.tree, false)?;
        self.write_trust(&mut state.tree)?;
        state.enter(at).map_err(unfit)?;
        Ok(state)
    }

    /// Starts the program in a new process, with only the program mapped, once `prepare` has
    /// changed its kernel state. Its state can be frozen if it `freezes`.
    pub(crate) fn start(
        &self,
        freezes: bool,
        prepare: impl FnOnce(&mut Kernel) -> Result<(), WarmError>,
    ) -> Result<Guest, WarmError> {
        let (path, args) = self.command_line()?;
        let mut state = match &self.files_of {
            Some(rest) => self.kernel_with_files(&rest.state)?,
            None => self.kernel(&path)?,
        };
        for (resource, soft, hard) in &self.limits {
            state.set_limit(*resource, *soft, *hard);
        }
        self.inherited.apply(&mut state);
        prepare(&mut state)?;
        let body = Subprocess::new(Process::new(None, None)?, FIRST);
        let mut sentry = Sentry::new(Arc::new(state), self.output, self.egress());
        sentry.answer_inside(self.answers_inside);
        if !freezes {
            sentry.contents.map_host_files();
        }
        let mut guest = Guest::new(body, sentry, ParkedSubprocesses::new(None));
        let args = args.iter().map(|arg| arg.as_bytes().to_vec()).collect();
        let pair =
            |(name, value): &(OsString, OsString)| [name.as_bytes(), value.as_bytes()].join(&b'=');
        let mut env = self.env.clone();
        trust::extend_environment(&mut env, &self.egress());
        let env: Vec<_> = env.iter().map(pair).collect();
        load::load(&mut guest, &path, args, env)?;
        Ok(guest)
    }

    /// Runs the program until it has answered the warm-up requests and waits for input, and freezes
    /// it there.
    ///
    /// # Errors
    /// When the host cannot run guests, the program cannot be loaded, or it ends or takes too long
    /// before it waits.
    pub fn warm(&self) -> Result<Warm, WarmError> {
        let mut guest = self.start(true, |_| Ok(()))?;
        guest.sentry.streams.stop = self.stop.clone();
        let deadline = after(self.start);
        let mut requests = self.requests.iter();
        let mut halt = None;
        let mut cut = false;
        loop {
            match next(&mut guest, &mut halt, deadline)? {
                StopReason::Idle(wait) => {
                    guest.sentry.streams.output.clear();
                    let Some(request) = requests.next() else {
                        // The server handles the warm-up client's disconnect now, so calls do not
                        // repeat it. Servers outside disconnect once: a guest that connects again
                        // at once is not awaited.
                        let state = &guest.sentry.state;
                        let hears = !cut && !matches!(wait, IdleWait::Read { .. });
                        if state.has_callers() || hears && state.has_lines() {
                            cut = true;
                            guest.sentry.lines.clear();
                            let state = guest.sentry.change();
                            state.cut_lines();
                            state.hang_up();
                            halt = guest.take_turns(deadline)?;
                            continue;
                        }
                        let standing = guest.freeze(wait, false)?;
                        let unserved = std::mem::take(&mut guest.sentry.unserved);
                        return Ok(Warm::new(standing, self.limits(), unserved));
                    };
                    let request = match &wait {
                        IdleWait::Parked(InputSource::Port) => http::in_full(request),
                        _ => request.into(),
                    };
                    halt =
                        guest.resume(&wait, Some(&request), StubCommands::default(), deadline)?;
                }
                StopReason::Late | StopReason::CpuTime => {
                    return Err(WarmError::Late { messages: guest.messages() });
                }
                StopReason::Unheard => return Err(WarmError::Stopped),
                StopReason::End(end, _) => {
                    return Err(WarmError::Ended { end, messages: guest.messages() });
                }
            }
        }
    }
}

/// Grants, and the targets of their links, which are granted by their own names.
fn by_all_names(mut granted: Vec<PathBuf>) -> Vec<PathBuf> {
    granted.retain(|path| path.is_absolute());
    let meant: Vec<_> = granted.iter().filter_map(|path| path.canonicalize().ok()).collect();
    granted.extend(meant);
    granted.sort();
    granted.dedup();
    granted
}

/// Where the guest halts next, unless it has already.
pub(crate) fn next(
    guest: &mut Guest,
    halt: &mut Option<StopReason>,
    deadline: Instant,
) -> Result<StopReason, PlatformError> {
    halt.take().map_or_else(|| guest.run(deadline), Ok)
}
