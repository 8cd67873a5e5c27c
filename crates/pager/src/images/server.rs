//! The server of shared images.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_store::{Sha256, Snapshot, Store};
use afresh_sys::errno::EAGAIN;
use afresh_sys::{Call, SysError, own_process, socket};

use super::admission::{Decision, Source};
use super::filling::{FillError, fill};
use super::message::{ImageAnswer, ImageRequest, REQUEST_BYTES, RefusalReason};
use super::peer::other_user;
use super::shelf::{Filling, Lookup, Shelf, is_lack_of_descriptors};
use crate::vmm::Listener;

/// Maximum images of a server. It has fewer where half of its descriptors are less than that.
pub const MAX_IMAGES: usize = 2048;

/// Clients at a time.
const MAX_CLIENTS: usize = 32;
/// Time limit of a client's request and its answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time of one wait before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);
/// Pause of the server after a failure to accept.
const PAUSE: Duration = Duration::from_secs(1);

/// An event of a server.
#[derive(Debug)]
#[non_exhaustive]
pub enum ImageEvent<'a> {
    /// The memory of a snapshot can be shared now.
    Added {
        /// The snapshot.
        snapshot: Sha256,
        /// Bytes of the file.
        bytes: usize,
        /// Bytes of all files of the server.
        charged: usize,
    },
    /// A snapshot is not shared.
    Failed {
        /// The snapshot.
        snapshot: Sha256,
        /// The cause.
        error: &'a (dyn std::error::Error + Send + Sync),
    },
    /// A client of another user was refused.
    OtherUser {
        /// The user.
        user: u32,
    },
    /// A client could not be accepted.
    ClientFailed {
        /// The cause.
        error: &'a io::Error,
    },
    /// A client got no answer. Reported once.
    AnswerFailed {
        /// The cause.
        error: &'a SysError,
    },
}

type Report = dyn Fn(&ImageEvent<'_>) + Send + Sync;

/// Passes images to the processes of its user and of root.
pub struct ImageServer {
    listener: Listener,
    work: Arc<Work>,
}

/// The state that the threads of a server share.
struct Work {
    shelf: Arc<Shelf>,
    clients: AtomicUsize,
    has_failed: AtomicBool,
    report: Box<Report>,
}

/// An image that is to be made.
struct Wanted {
    filling: Filling,
    source: Source,
    /// Directory of the store.
    directory: File,
}

impl std::fmt::Debug for ImageServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageServer").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl ImageServer {
    /// A server at `listener`, whose files take at most `budget` bytes, and half of the descriptors
    /// that this process can have now.
    pub fn new(
        listener: Listener,
        budget: usize,
        report: impl Fn(&ImageEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        let max_images = (own_process::descriptor_limit() / 2).clamp(1, MAX_IMAGES);
        let work = Work {
            shelf: Shelf::new(budget, max_images),
            clients: AtomicUsize::new(0),
            has_failed: AtomicBool::new(false),
            report: Box::new(report),
        };
        Self { listener, work: Arc::new(work) }
    }

    /// Adds the memory of `snapshot` before a client requests it.
    ///
    /// # Errors
    /// A snapshot that is sealed or has turns, a damaged one, or one that exceeds the budget.
    pub fn add(&self, snapshot: &Snapshot) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let Some(memory) = snapshot.memory_digest() else {
            return Err("a snapshot that is sealed or has turns is not shared".into());
        };
        match self.work.shelf.begin(memory) {
            Ok(Some(filling)) => Ok(self.work.add(filling, snapshot)?),
            Ok(None) => Ok(()),
            Err(reason) => Err(FillError::Refused(reason).into()),
        }
    }

    /// Bytes of the files of all images.
    #[must_use]
    pub fn charged(&self) -> usize {
        self.work.shelf.charged()
    }

    /// Answers clients until `stop` is set. Snapshots that are being read then are not waited for.
    pub fn serve(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            let stream = match self.listener.accept_within(TICK) {
                Ok(Some(stream)) => stream,
                Ok(None) => continue,
                Err(error) => {
                    // Without a descriptor the client waits until one is free.
                    if error.raw_os_error().is_some_and(is_lack_of_descriptors) {
                        self.work.shelf.free_descriptor();
                    }
                    (self.work.report)(&ImageEvent::ClientFailed { error: &error });
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            // One client too many sees the end of the stream.
            if self.work.clients.fetch_add(1, Ordering::AcqRel) >= MAX_CLIENTS {
                self.work.clients.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let work = self.work.clone();
            let place = ClientPlace(self.work.clone());
            let thread = std::thread::Builder::new().name("afresh-images".to_owned());
            let spawned = thread.spawn(move || {
                let wanted = work.converse(&stream).unwrap_or_else(|error| {
                    // A client can end at any time, so others may follow.
                    if !work.has_failed.swap(true, Ordering::Relaxed) {
                        (work.report)(&ImageEvent::AnswerFailed { error: &error });
                    }
                    None
                });
                drop((stream, place));
                if let Some(wanted) = wanted {
                    work.add_from(wanted);
                }
            });
            if let Err(error) = spawned {
                (self.work.report)(&ImageEvent::ClientFailed { error: &error });
            }
        }
    }
}

/// The place of a client.
struct ClientPlace(Arc<Work>);

impl Drop for ClientPlace {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Work {
    /// Answers the request of a client. Returns the image that is to be made for it.
    fn converse(&self, stream: &UnixStream) -> Result<Option<Wanted>, SysError> {
        if let Some(user) = other_user(stream)? {
            (self.report)(&ImageEvent::OtherUser { user });
            return Ok(None);
        }
        let mut fds = Vec::new();
        let Some(request) = receive_request(stream, &mut fds)? else { return Ok(None) };
        let mut wanted = None;
        let mut file = None;
        let answer = match self.shelf.look_up(&request.memory)? {
            Lookup::Image(fd, bytes) => {
                file = Some(fd);
                ImageAnswer::Image { bytes: bytes as u64 }
            }
            Lookup::Filling => ImageAnswer::Pending,
            Lookup::Full => ImageAnswer::Refused(RefusalReason::Images),
            Lookup::Missing => match fds.pop().filter(|_| fds.is_empty()) {
                None => ImageAnswer::Refused(RefusalReason::NoDirectory),
                Some(directory) => match self.admit(request, directory.into()) {
                    Err(reason) => ImageAnswer::Refused(reason),
                    Ok(admitted) => {
                        wanted = admitted;
                        ImageAnswer::Pending
                    }
                },
            },
        };
        let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        socket::send(stream, &answer.encode(), &fds)?;
        Ok(wanted)
    }

    /// Decides about an image that is missing. `None` where it is to be made later, or by another
    /// thread.
    fn admit(
        &self,
        request: ImageRequest,
        directory: File,
    ) -> Result<Option<Wanted>, RefusalReason> {
        let stat = directory.metadata().map_err(|_| RefusalReason::Failed)?;
        let source = Source { request, directory: (stat.dev(), stat.ino()) };
        match self.shelf.decide(&source) {
            Decision::Wait => Ok(None),
            Decision::Refuse(reason) => Err(reason),
            Decision::Read => {
                let filling = self.shelf.begin(request.memory)?;
                Ok(filling.map(|filling| Wanted { filling, source, directory }))
            }
        }
    }

    /// Makes an image of a snapshot in the store of a client.
    fn add_from(&self, wanted: Wanted) {
        let Wanted { filling, source, directory } = wanted;
        let snapshot = source.request.snapshot;
        let open = || {
            let store = Store::open(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
            store.load_id(snapshot)
        };
        let result = match open() {
            Ok(snapshot) => self.add(filling, &snapshot),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = result {
            let reason = match &error {
                FillError::Refused(reason) => *reason,
                _ => RefusalReason::Failed,
            };
            self.shelf.fail(source, reason);
            (self.report)(&ImageEvent::Failed { snapshot, error: &error });
        }
    }

    fn add(&self, mut filling: Filling, snapshot: &Snapshot) -> Result<(), FillError> {
        let file = fill(snapshot, &mut filling)?;
        let bytes = file.bytes();
        filling.finish(file);
        let charged = self.shelf.charged();
        (self.report)(&ImageEvent::Added { snapshot: snapshot.id(), bytes, charged });
        Ok(())
    }
}

/// The request of a client, and the descriptors that came with it. `None` for other bytes.
fn receive_request(
    stream: &UnixStream,
    fds: &mut Vec<OwnedFd>,
) -> Result<Option<ImageRequest>, SysError> {
    let mut bytes = [0; REQUEST_BYTES];
    let end = Instant::now() + CLIENT_TIMEOUT;
    let io = |error: io::Error| SysError::new(Call::Socket, error.raw_os_error().unwrap_or(EAGAIN));
    stream.set_write_timeout(Some(CLIENT_TIMEOUT)).map_err(io)?;
    let received = receive_all(stream, &mut bytes, fds, end)?;
    Ok(if received { ImageRequest::decode(&bytes) } else { None })
}

/// Fills `bytes` before `end`. Returns whether so many bytes, and few descriptors, came.
pub(super) fn receive_all(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    end: Instant,
) -> Result<bool, SysError> {
    /// A message has one descriptor at most. Others are closed.
    const MAX_DESCRIPTORS: usize = 1;
    let mut done = 0;
    while done < bytes.len() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(SysError::new(Call::Receive, EAGAIN));
        }
        stream
            .set_read_timeout(Some(left))
            .map_err(|error| SysError::new(Call::Socket, error.raw_os_error().unwrap_or(EAGAIN)))?;
        match socket::receive(stream, &mut bytes[done..], fds)? {
            0 => return Ok(false),
            more => done += more,
        }
        if fds.len() > MAX_DESCRIPTORS {
            return Ok(false);
        }
    }
    Ok(true)
}
