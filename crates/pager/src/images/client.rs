//! The client of an image server.
//!
//! Promises: a snapshot opens whether a server answers or not, and no later than after
//! [`ANSWER_TIMEOUT`] without one. After a failure no request is sent for [`RETRY_INTERVAL`]. The
//! first failure of each kind is reported, and later ones are not.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh_memory::{Image, PAGE_SIZE, SealedImageFile, SealedMemfd};
use afresh_store::{Pages, Snapshot};
use afresh_sys::socket;

use super::error::ImageClientError;
use super::message::{ANSWER_BYTES, ImageAnswer, ImageRequest};
use super::peer::{is_protected, other_user};
use super::server::receive_all;

/// Time limit of an answer of the server.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);
/// Time without requests after a failure of the server.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Requests the memory of snapshots from an image server.
pub struct ImageClient {
    socket: PathBuf,
    report: Box<dyn Fn(&ImageClientError) + Send + Sync>,
    made: Instant,
    /// Kinds of failures so far.
    failures: AtomicU32,
    /// Milliseconds since `made` from which on requests are sent again.
    retry_at: AtomicU64,
}

impl std::fmt::Debug for ImageClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageClient").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl ImageClient {
    /// A client of the server that listens at `socket`. `report` gets the first failure of each
    /// kind.
    pub fn new(
        socket: impl Into<PathBuf>,
        report: impl Fn(&ImageClientError) + Send + Sync + 'static,
    ) -> Self {
        Self {
            socket: socket.into(),
            report: Box::new(report),
            made: Instant::now(),
            failures: AtomicU32::new(0),
            retry_at: AtomicU64::new(0),
        }
    }

    /// The memory of `snapshot`, if the server has it. Otherwise this process makes its own image,
    /// and the server may read the snapshot for later requests.
    #[must_use]
    pub fn image(&self, snapshot: &Snapshot) -> Option<Image> {
        let now = self.made.elapsed();
        if now < Duration::from_millis(self.retry_at.load(Ordering::Relaxed)) {
            return None;
        }
        self.fetch(snapshot).unwrap_or_else(|error| {
            // The server is well, and has no room for this image.
            if !matches!(error, ImageClientError::Refused(_)) {
                let later = (now + RETRY_INTERVAL).as_millis();
                self.retry_at.store(u64::try_from(later).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
            let kind = error.kind().unwrap_or(0);
            if kind & !self.failures.fetch_or(kind, Ordering::Relaxed) != 0 {
                (self.report)(&error);
            }
            None
        })
    }

    /// The memory of `snapshot`. `None` until the server has read it, where this process has as
    /// many images with separate files as it may, and for a snapshot that is not shared: a sealed
    /// one, one with turns, and one that is not in a local directory.
    ///
    /// # Errors
    /// [`ImageClientError`] by cause.
    pub fn fetch(&self, snapshot: &Snapshot) -> Result<Option<Image>, ImageClientError> {
        let (Some(directory), Some(memory)) = (snapshot.directory(), snapshot.memory_digest())
        else {
            return Ok(None);
        };
        let layout = SealedImageFile::new(snapshot.pages(), &Pages::occupied(snapshot))?;
        if layout.file_pages() == 0 {
            return Ok(None);
        }
        if !Image::has_room_for_sealed() {
            return Ok(None);
        }
        let directory = socket::directory(directory).map_err(ImageClientError::Directory)?;
        let request = ImageRequest { memory, snapshot: snapshot.id() };
        let (answer, file) = self.exchange(&request, &directory)?;
        let bytes = match (answer, &file) {
            (ImageAnswer::Image { bytes }, Some(_)) => bytes,
            (ImageAnswer::Pending, None) => return Ok(None),
            (ImageAnswer::Refused(reason), None) => return Err(ImageClientError::Refused(reason)),
            _ => return Err(ImageClientError::Answer),
        };
        let expected = layout.file_pages() * PAGE_SIZE;
        let Some(file) = file.filter(|_| bytes == expected as u64) else {
            return Err(ImageClientError::Answer);
        };
        let file = SealedMemfd::from_received(file, expected).map_err(ImageClientError::File)?;
        Ok(Image::from_sealed(&layout, file)?)
    }

    /// The server's answer, and the descriptor that came with it.
    fn exchange(
        &self,
        request: &ImageRequest,
        directory: &OwnedFd,
    ) -> Result<(ImageAnswer, Option<OwnedFd>), ImageClientError> {
        if !is_protected(&self.socket) {
            return Err(ImageClientError::Unprotected);
        }
        let stream = socket::connect(&self.socket, ANSWER_TIMEOUT)?;
        if let Some(user) = other_user(&stream)? {
            return Err(ImageClientError::User(user));
        }
        let end = Instant::now() + ANSWER_TIMEOUT;
        socket::send(&stream, &request.encode(), &[directory.as_fd()])?;
        let (mut bytes, mut fds) = ([0; ANSWER_BYTES], Vec::new());
        if !receive_all(&stream, &mut bytes, &mut fds, end)? {
            return Err(ImageClientError::Closed);
        }
        let answer = ImageAnswer::decode(&bytes).ok_or(ImageClientError::Answer)?;
        Ok((answer, fds.pop()))
    }
}
