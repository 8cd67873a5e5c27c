//! A blob on the other side of the network, read by ranges.

use std::io;
use std::ops::Range;

use object_store::ObjectStoreExt;

use super::cache::{BLOCK, CacheFile};
use super::{Remote, RemoteError};
use crate::blobs::BlobRead;
use crate::{OpenError, Sha256};

/// A blob of a remote.
pub(super) struct RangeBlob {
    remote: Remote,
    digest: Sha256,
    len: u64,
    cache: Option<CacheFile>,
}

impl RangeBlob {
    pub(super) fn new(remote: Remote, digest: Sha256, len: u64) -> Result<Self, OpenError> {
        let cache = match &remote.0.cache {
            None => None,
            Some(dir) => {
                Some(CacheFile::open(dir, digest, len).map_err(|e| OpenError::io(dir, e))?)
            }
        };
        Ok(Self { remote, digest, len, cache })
    }

    fn fetch(&self, offset: u64, len: u64) -> io::Result<Vec<u8>> {
        self.remote
            .block_on(self.remote.get_range(self.digest, offset, len))
            .map_err(io::Error::other)
    }

    /// Reads through the cache: neighbouring blocks that are not there are fetched by one request.
    fn read_cached(&self, cache: &CacheFile, out: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + out.len() as u64;
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        let mut copy = |number: u64, block: &[u8]| {
            let start = number * BLOCK;
            let from = offset.max(start);
            let to = end.min(start + block.len() as u64);
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&block[(from - start) as usize..(to - start) as usize]);
        };
        let mut missing: Vec<Range<u64>> = Vec::new();
        for number in blocks {
            match (cache.get(number), missing.last_mut()) {
                (Some(block), _) => copy(number, &block),
                (None, Some(run)) if run.end == number => run.end += 1,
                (None, _) => missing.push(number..number + 1),
            }
        }
        for run in missing {
            let start = run.start * BLOCK;
            let bytes = self.fetch(start, (run.end * BLOCK).min(self.len) - start)?;
            for (number, block) in run.zip(bytes.chunks(BLOCK as usize)) {
                copy(number, block);
                cache.put(number, block);
            }
        }
        Ok(())
    }
}

impl Remote {
    /// Fetches `len` bytes at `offset`, and tries again when fewer come.
    pub(super) async fn get_range(
        &self,
        digest: Sha256,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let path = self.blob_path(digest);
        let what = digest.to_string();
        let mut rounds = 0;
        loop {
            let bytes = self
                .attempt(&what, || self.0.objects.get_range(&path, offset..offset + len))
                .await?;
            if bytes.len() as u64 == len {
                return Ok(bytes.into());
            }
            rounds += 1;
            if rounds >= self.0.patience.attempts {
                let found = bytes.len() as u64;
                return Err(RemoteError::Length { what, found, wanted: len });
            }
        }
    }
}

impl BlobRead for RangeBlob {
    fn len(&self) -> u64 {
        self.len
    }

    fn distrust(&self, offset: u64, len: u64) -> bool {
        if let Some(cache) = &self.cache {
            cache.forget(offset, len);
        }
        true
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match &self.cache {
            Some(cache) => self.read_cached(cache, out, offset),
            None => {
                out.copy_from_slice(&self.fetch(offset, out.len() as u64)?);
                Ok(())
            }
        }
    }
}
