//! An object store in memory that misbehaves on request, and counts.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

/// Faults of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ServerFault {
    Nothing,
    /// The connection is reset by so many requests, after so many good ones.
    Reset {
        after: usize,
        times: usize,
    },
    /// So many answers are a byte short.
    Short {
        times: usize,
    },
    /// Bits of every blob read by range are flipped.
    Flip,
    /// So many objects are put whose answers are lost.
    Lost {
        times: usize,
    },
    /// An object whose name ends so is put, its answer is lost, and no later request arrives.
    Severed {
        at: &'static str,
    },
    /// Requests after so many wait until the server does something else.
    Held {
        after: usize,
    },
    /// Conditions of writes are ignored: none, those of new objects, or those of versions.
    Unconditional {
        create: bool,
        update: bool,
    },
    /// Every answer takes so long. Counts rounds.
    Slow(Duration),
}

/// An object store that misbehaves on request.
#[derive(Debug)]
pub(crate) struct Server {
    objects: InMemory,
    wrong: Mutex<ServerFault>,
    pub(crate) requests: AtomicUsize,
    failed: AtomicUsize,
    /// Longest chain of requests that each began after the end of the previous one.
    pub(crate) rounds: AtomicUsize,
}

impl Server {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            objects: InMemory::new(),
            wrong: Mutex::new(ServerFault::Nothing),
            requests: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            rounds: AtomicUsize::new(0),
        })
    }

    pub(crate) fn be(&self, wrong: ServerFault) {
        *self.wrong.lock().unwrap() = wrong;
        self.requests.store(0, Ordering::Relaxed);
        self.failed.store(0, Ordering::Relaxed);
        self.rounds.store(0, Ordering::Relaxed);
    }

    /// Lets a request through, late, or not.
    async fn request(&self) -> Result<ServerFault> {
        let wrong = *self.wrong.lock().unwrap();
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let round = self.rounds.load(Ordering::Relaxed) + 1;
        match wrong {
            ServerFault::Slow(delay) => {
                tokio::time::sleep(delay).await;
                self.rounds.fetch_max(round, Ordering::Relaxed);
            }
            ServerFault::Held { after } if number >= after => {
                while *self.wrong.lock().unwrap() == wrong {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
            ServerFault::Severed { .. } if self.failed.load(Ordering::Relaxed) > 0 => {
                let source = "connection refused".into();
                return Err(Error::Generic { store: "test", source });
            }
            ServerFault::Reset { after, times }
                if number >= after && self.failed.fetch_add(1, Ordering::Relaxed) < times =>
            {
                let source = "connection reset by peer".into();
                return Err(Error::Generic { store: "test", source });
            }
            _ => {}
        }
        Ok(wrong)
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("test server")
    }
}

#[async_trait]
impl ObjectStore for Server {
    async fn put_opts(&self, to: &Path, data: PutPayload, how: PutOptions) -> Result<PutResult> {
        let wrong = self.request().await?;
        let ignored = match (&how.mode, wrong) {
            (PutMode::Create, ServerFault::Unconditional { create, .. }) => create,
            (PutMode::Update(_), ServerFault::Unconditional { update, .. }) => update,
            _ => false,
        };
        let how = if ignored { PutMode::Overwrite.into() } else { how };
        let done = self.objects.put_opts(to, data, how).await?;
        let lost = match wrong {
            ServerFault::Lost { times } => self.failed.fetch_add(1, Ordering::Relaxed) < times,
            ServerFault::Severed { at } if to.as_ref().ends_with(at) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                true
            }
            _ => false,
        };
        if lost {
            let source = "connection reset by peer".into();
            return Err(Error::Generic { store: "test", source });
        }
        Ok(done)
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.request().await?;
        self.objects.put_multipart_opts(to, how).await
    }

    async fn get_opts(&self, from: &Path, how: GetOptions) -> Result<GetResult> {
        let wrong = self.request().await?;
        let by_range = how.range.is_some();
        let mut result = self.objects.get_opts(from, how).await?;
        let short = matches!(wrong, ServerFault::Short { times }
            if by_range && self.failed.fetch_add(1, Ordering::Relaxed) < times);
        if by_range && (short || wrong == ServerFault::Flip) {
            let range: Range<u64> = result.range.clone();
            let mut data = self.objects.get_ranges(from, &[range]).await?[0].to_vec();
            if short {
                data.pop();
            } else {
                // Near the start, which may be pages or frames, and near the end, the footer.
                let last = data.len() - 1;
                data[17.min(last)] ^= 4;
                data[last.saturating_sub(100)] ^= 4;
            }
            let stream = futures_util::stream::iter([Ok(Bytes::from(data))]);
            result.payload = GetResultPayload::Stream(Box::pin(stream));
        }
        Ok(result)
    }

    fn delete_stream(
        &self,
        which: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(which)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, how).await
    }
}
