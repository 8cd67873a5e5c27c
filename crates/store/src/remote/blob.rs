//! A blob on the other side of the network, read by ranges.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::cache::{BLOCK, CacheFile};
use super::{Remote, RemoteError};
use crate::format::blob::BlobRead;
use crate::format::index::{FOOTER_LEN, Footer};
use crate::{Limits, OpenError, Sha256};

/// Bytes fetched from the end of a layer to begin with: the index of a layer of 256 MiB and more.
const TAIL: u64 = 256 << 10;
/// Requests in flight for one scattered read.
const IN_FLIGHT: usize = 16;

/// A blob of a remote.
pub(super) struct RangeBlob {
    remote: Remote,
    digest: Sha256,
    len: u64,
    cache: Option<CacheFile>,
    tail: Tail,
}

/// The last bytes of a blob, fetched ahead of the reader.
#[derive(Clone, Default)]
pub(super) struct Tail(Arc<Mutex<Option<TailBytes>>>);

struct TailBytes {
    offset: u64,
    bytes: Vec<u8>,
}

impl Tail {
    fn set(&self, kept: Option<TailBytes>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    fn get(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.as_ref()?;
        let start = range.start.checked_sub(kept.offset)? as usize;
        kept.bytes.get(start..start + (range.end - range.start) as usize).map(<[u8]>::to_vec)
    }

    /// Lets go of it unless it is the whole blob, which spares requests later.
    pub(super) fn opened(&self) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.as_ref().is_some_and(|kept| kept.offset > 0) {
            *kept = None;
        }
    }
}

impl RangeBlob {
    pub(super) fn new(remote: Remote, digest: Sha256, len: u64) -> Result<Self, OpenError> {
        let cache = match &remote.cache {
            None => None,
            Some(dir) => {
                Some(CacheFile::open(dir, digest, len).map_err(|e| OpenError::io(dir, e))?)
            }
        };
        Ok(Self { remote, digest, len, cache, tail: Tail::default() })
    }

    pub(super) fn tail(&self) -> Tail {
        self.tail.clone()
    }

    /// Fetches what opening the layer will read, its footer and index: one round trip, and a second
    /// where the index is large. Whether it is right is for the opener to find out. `indexes`
    /// counts the bytes of the indexes of all layers, which have one limit.
    pub(super) async fn fetch_tail(
        &self,
        limits: &Limits,
        indexes: &Cell<u64>,
    ) -> Result<(), RemoteError> {
        let offset = self.len.saturating_sub(TAIL);
        let mut kept = TailBytes { offset, bytes: self.bytes(offset..self.len).await? };
        if let Some(footer) = kept.bytes.last_chunk::<FOOTER_LEN>()
            && let Ok(footer) = Footer::parse(footer, self.len)
            && footer.index_offset < offset
        {
            indexes.set(indexes.get().saturating_add(footer.index_len));
            limits.check_index(indexes.get())?;
            let mut bytes = self.bytes(footer.index_offset..offset).await?;
            bytes.append(&mut kept.bytes);
            kept = TailBytes { offset: footer.index_offset, bytes };
        }
        self.tail.set(Some(kept));
        Ok(())
    }

    /// The bytes in `range`, which is inside the blob.
    async fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>, RemoteError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(bytes) = self.tail.get(&range) {
            return Ok(bytes);
        }
        match &self.cache {
            None => self.remote.backend.range(self.digest, range).await,
            Some(cache) => self.cached(cache, range).await,
        }
    }

    /// Reads through the cache: neighbouring blocks that are not there are fetched by one request.
    async fn cached(&self, cache: &CacheFile, range: Range<u64>) -> Result<Vec<u8>, RemoteError> {
        let mut out = vec![0; (range.end - range.start) as usize];
        let mut copy = |number: u64, block: &[u8]| {
            let start = number * BLOCK;
            let from = range.start.max(start);
            let to = range.end.min(start + block.len() as u64);
            out[(from - range.start) as usize..(to - range.start) as usize]
                .copy_from_slice(&block[(from - start) as usize..(to - start) as usize]);
        };
        let mut missing: Vec<Range<u64>> = Vec::new();
        for number in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            match (cache.get(number), missing.last_mut()) {
                (Some(block), _) => copy(number, &block),
                (None, Some(run)) if run.end == number => run.end += 1,
                (None, _) => missing.push(number..number + 1),
            }
        }
        let mut fetched = stream::iter(missing)
            .map(|run| async move {
                let bytes = run.start * BLOCK..(run.end * BLOCK).min(self.len);
                let bytes = self.remote.backend.range(self.digest, bytes).await?;
                Ok::<_, RemoteError>((run, bytes))
            })
            .buffer_unordered(IN_FLIGHT);
        while let Some((run, bytes)) = fetched.try_next().await? {
            for (number, block) in run.zip(bytes.chunks(BLOCK as usize)) {
                copy(number, block);
                cache.put(number, block);
            }
        }
        Ok(out)
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<Range<u64>> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(offset..end),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl BlobRead for RangeBlob {
    fn len(&self) -> u64 {
        self.len
    }

    fn is_distant(&self) -> bool {
        true
    }

    fn distrust(&self, offset: u64, len: u64) -> bool {
        self.tail.set(None);
        if let Some(cache) = &self.cache {
            cache.forget(offset, len);
        }
        true
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_many(&mut [(offset, out)])
    }

    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        for (offset, out) in parts.iter() {
            self.check(*offset, out.len())?;
        }
        self.remote
            .block_on(
                stream::iter(parts.iter_mut())
                    .map(|(offset, out)| async move {
                        let range = *offset..*offset + out.len() as u64;
                        out.copy_from_slice(&self.bytes(range).await?);
                        Ok(())
                    })
                    .buffer_unordered(IN_FLIGHT)
                    .try_collect(),
            )
            .map_err(io::Error::other)
    }
}
