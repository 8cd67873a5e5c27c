//! A program to be warmed: which one, with what, and what it may have.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_files::{Refused, Time};

use crate::bodies::Others;
use crate::body::Body;
use crate::error::WarmError;
use crate::guest::{Guest, Halt, after};
use crate::http;
use crate::load;
use crate::personality::{self, Ear, End, FIRST, Layout, Person, State};
use crate::platform::{IMAGE_LEN, Orders, Place, PlatformError, Process};
use crate::ranges::Ranges;
use crate::showing::Showing;
use crate::standing::Wait;
use crate::warm::{Limits, Warm};

/// What of the host every guest may read: programs and libraries, and what says where they are.
const SYSTEM: [&str; 10] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/ssl/openssl.cnf",
];

/// A Linux program, its arguments, the files it may see and its limits.
///
/// It is started by [`Program::warm`] and runs until all of its threads wait, and it waits for input on descriptor 0 or listens
/// on a port: that is the state that every call starts from. It has no network but its own loopback, up to 31 processes beside its
/// first, which are part of that state, and their memory counts together; it sees of
/// the host's files the system's programs and libraries and what is granted, all read-only, and keeps its own in memory.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    granted: Vec<PathBuf>,
    files: Vec<(PathBuf, Vec<u8>)>,
    requests: Vec<Vec<u8>>,
    directory: PathBuf,
    memory: u64,
    storage: u64,
    output: usize,
    time: Duration,
    slice: Option<Duration>,
    start: Duration,
}

/// The file that a shell would run for a word: the first of that name in the directories of `PATH`.
#[must_use]
pub fn find_in_path(word: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&folders).map(|folder| folder.join(word));
    files.find(|file| file.is_file())
}

impl Program {
    /// The program at `path`: an absolute path of the host's, or of a file given by [`Program::file`], to an ELF file for
    /// x86-64, static or dynamic, or to an executable script whose interpreter it may read.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            args: Vec::new(),
            env: Vec::new(),
            granted: Vec::new(),
            files: Vec::new(),
            requests: Vec::new(),
            directory: PathBuf::from("/"),
            memory: 1 << 30,
            storage: 256 << 20,
            output: 64 << 20,
            time: Duration::from_secs(10),
            slice: None,
            start: Duration::from_secs(60),
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_os_string());
        self
    }

    /// Sets a variable of the environment, which is empty otherwise.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_os_string(), value.as_ref().to_os_string()));
        self
    }

    /// Lets the guest read the host's file or directory at `path` (absolute), and what lies below it.
    ///
    /// What is there must not change while guests are warm: a file that is open is read again in every call.
    #[must_use]
    pub fn grant(mut self, path: impl Into<PathBuf>) -> Self {
        self.granted.push(path.into());
        self
    }

    /// Gives the guest a file of its own at `path` (absolute).
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((path.into(), bytes.into()));
        self
    }

    /// Has the program answer `bytes` before it counts as warm, so that what it does once is done. Answers are dropped.
    /// Empty bytes are the end of the input. To a server `GET /path` is a request in short.
    #[must_use]
    pub fn request(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.requests.push(bytes.into());
        self
    }

    /// The directory that the program starts in; `/` otherwise.
    #[must_use]
    pub fn directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.directory = path.into();
        self
    }

    /// Bytes of memory it may map; 1 GiB otherwise, 1 TiB at most. More is refused with `ENOMEM`.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Bytes of files it may write; 256 MiB otherwise. More is refused with `ENOSPC`.
    #[must_use]
    pub fn storage_limit(mut self, bytes: u64) -> Self {
        self.storage = bytes;
        self
    }

    /// Bytes of output a call may have; 64 MiB otherwise. More ends the call.
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output = bytes;
        self
    }

    /// How long a call may run; 10 seconds otherwise.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time = limit;
        self
    }

    /// How long a call that is [heard](crate::Instance::call_heard) goes on, once it is answered, for what the program does in the
    /// background; otherwise as long as any thread of it can run.
    #[must_use]
    pub fn slice(mut self, length: Duration) -> Self {
        self.slice = Some(length);
        self
    }

    /// How long it may take to become warm; a minute otherwise.
    #[must_use]
    pub fn start_limit(mut self, limit: Duration) -> Self {
        self.start = limit;
        self
    }

    /// What of the host the guest may read, by all of its names.
    pub(crate) fn all_granted(&self) -> Vec<PathBuf> {
        let mut granted: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
        granted.extend(self.granted.iter().cloned());
        granted.push(self.path.clone());
        granted.retain(|path| path.is_absolute());
        // What a grant leads to through links is granted by its own name, too.
        let meant: Vec<_> = granted.iter().filter_map(|path| path.canonicalize().ok()).collect();
        granted.extend(meant);
        granted.sort();
        granted.dedup();
        granted
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits { output: self.output, time: self.time, slice: self.slice, ..Limits::default() }
    }

    /// Starts the program in a process of its own, with nothing mapped but the program.
    fn start(&self) -> Result<Guest, WarmError> {
        let own = self.files.iter().any(|(path, _)| *path == self.path);
        let real = match own {
            true => self.path.clone(),
            false => {
                let missing = |_| WarmError::NotFound(self.path.clone());
                self.path.canonicalize().map_err(missing)?
            }
        };
        // What it begins with does not count against what it may store.
        let given: u64 = self.files.iter().map(|(_, bytes)| bytes.len() as u64 + (1 << 12)).sum();
        let unfit = |path: &Path| {
            let path = path.to_path_buf();
            move |error: Refused| WarmError::File { path, error }
        };
        let storage = self.storage.saturating_add(given);
        let (mut tree, layers) =
            personality::prepare(&self.all_granted(), storage).map_err(unfit(&self.path))?;
        let memory = self.memory.min(IMAGE_LEN);
        personality::tell(&mut tree, memory).map_err(unfit(Path::new("/proc")))?;
        for (path, bytes) in &self.files {
            let written = tree.write_path(personality::bytes(path), bytes, Time::default());
            written.map_err(unfit(path))?;
        }
        let directory = &self.directory;
        let at = tree.find(personality::bytes(directory)).map_err(unfit(directory))?;
        let mut state = State::new(Layout::new(memory), tree, layers);
        state.enter(at).map_err(unfit(directory))?;
        state.family.own.program = personality::bytes(&real).to_vec();
        let body =
            Body::new(Process::new(None)?, FIRST, None, Ranges::default(), Showing::default());
        let person = Person::new(Arc::new(state), self.output);
        let mut guest = Guest::new(body, person, Others::new(None));
        let mut args = vec![self.path.as_os_str().as_bytes().to_vec()];
        args.extend(self.args.iter().map(|arg| arg.as_bytes().to_vec()));
        let pair =
            |(name, value): &(OsString, OsString)| [name.as_bytes(), value.as_bytes()].join(&b'=');
        let env: Vec<_> = self.env.iter().map(pair).collect();
        load::load(&mut guest, &self.path, args, env)?;
        Ok(guest)
    }

    /// Runs the program once, from its start to its end, with `input`.
    ///
    /// # Errors
    /// As [`Program::warm`]; that the program ended is no error, however it did.
    pub fn run(&self, input: &[u8]) -> Result<Run, WarmError> {
        let mut guest = self.start()?;
        let deadline = after(self.start);
        guest.person.streams.input = input.to_vec();
        guest.person.streams.uncalled = true;
        let mut halt = None;
        loop {
            match next(&mut guest, &mut halt, deadline)? {
                // Nothing comes any more: the end of the input. Nobody calls a server.
                Halt::Idle(Wait::Parked(Ear::Port)) => {
                    halt = Some(Halt::End(End::Deadlock, Place::Stub));
                }
                Halt::Idle(wait) => {
                    halt = guest.resume(&wait, Some(b""), Orders::default(), deadline)?
                }
                Halt::Late => return Err(WarmError::Late { messages: guest.messages() }),
                Halt::End(end, _) => {
                    let messages = guest.messages();
                    let output = std::mem::take(&mut guest.person.streams.output);
                    return Ok(Run { end, output, messages });
                }
            }
        }
    }

    /// Runs the program until it has answered the warm-up requests and waits for input, and freezes it there.
    ///
    /// # Errors
    /// When the host cannot run guests, the program cannot be loaded, or it ends or takes too long before it waits.
    pub fn warm(&self) -> Result<Warm, WarmError> {
        let mut guest = self.start()?;
        let deadline = after(self.start);
        let mut requests = self.requests.iter();
        let mut halt = None;
        loop {
            match next(&mut guest, &mut halt, deadline)? {
                Halt::Idle(wait) => {
                    guest.person.streams.output.clear();
                    let Some(request) = requests.next() else {
                        // What a server does when a caller is gone it does now, and not in every call.
                        if guest.person.state.has_callers() {
                            guest.person.change().hang_up();
                            halt = guest.take_turns(deadline)?;
                            continue;
                        }
                        let standing = guest.freeze(wait, false)?;
                        let unserved = std::mem::take(&mut guest.person.unserved);
                        return Ok(Warm::new(standing, self.limits(), unserved));
                    };
                    let request = match &wait {
                        Wait::Parked(Ear::Port) => http::in_full(request),
                        _ => request.into(),
                    };
                    halt = guest.resume(&wait, Some(&request), Orders::default(), deadline)?;
                }
                Halt::Late => return Err(WarmError::Late { messages: guest.messages() }),
                Halt::End(end, _) => {
                    return Err(WarmError::Ended { end, messages: guest.messages() });
                }
            }
        }
    }
}

/// Where the guest halts next, unless it has already.
fn next(
    guest: &mut Guest,
    halt: &mut Option<Halt>,
    deadline: Instant,
) -> Result<Halt, PlatformError> {
    halt.take().map_or_else(|| guest.run(deadline), Ok)
}

/// What a program did from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// How it ended.
    pub end: crate::End,
    /// What it wrote to its standard output.
    pub output: Vec<u8>,
    /// The end of what it wrote to its standard error.
    pub messages: String,
}
