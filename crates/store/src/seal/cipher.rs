//! Sealed blobs: any blob, cut into chunks that are each encrypted and authenticated.
//!
//! Each blob has another random key, wrapped by a key that is derived from the user's and 40 random
//! bytes, for this blob only. No key wraps twice, so no nonce can repeat. Version 1 had one
//! wrapping key and random nonces of 96 bits; its blobs still open. A chunk's nonce is its number
//! and whether it is the last, so chunks cannot change places, be left out or come from another
//! blob. Chunks have the length of a group of pages, so each group of a raw layer is one chunk. The
//! key data of a blob comes last, as in a layer, so that the same request fetches both.

use std::fmt;
use std::io;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};

use crate::SealError;
use crate::format::blob::BlobRead;
use crate::format::digest::to_hex;
use crate::{OpenError, SaveError};

/// Bytes of the trailer.
const TRAILER: usize = 128;
const MAGIC: [u8; 8] = *b"AFRESHSL";
const VERSION_1: u32 = 1;
const VERSION_2: u32 = 2;
/// The only cipher: AES-256-GCM.
const CIPHER: u32 = 1;
/// Plain bytes of a chunk.
const CHUNK: usize = 64 << 10;
/// Bytes of an authentication tag.
const TAG: usize = 16;
/// The bytes of the trailer that the wrapped key is bound to.
const BOUND: usize = 40;
const WRAPPED: std::ops::Range<usize> = 52..100;
/// Where version 1 has the nonce of the wrapped key, and version 2 the first 12 random bytes.
const NONCE: std::ops::Range<usize> = 40..52;
/// Where version 2 has the other 28, and version 1 zeros.
const REST: std::ops::Range<usize> = 100..TRAILER;
/// Chunks decrypted at a time: 2 MiB.
const BATCH: u64 = 32;

pub(super) fn random<const N: usize>() -> Result<[u8; N], SealError> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| SealError::Library("the system gives no random bytes"))?;
    Ok(bytes)
}

fn aead(key: &[u8; 32]) -> Result<LessSafeKey, SealError> {
    UnboundKey::new(&AES_256_GCM, key)
        .map(LessSafeKey::new)
        .map_err(|_| SealError::Library("the key is invalid"))
}

/// Number of derived bytes.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn derive<const N: usize>(from: &Prk, what: &[u8]) -> Result<[u8; N], SealError> {
    let mut out = [0; N];
    from.expand(&[what], Length(N))
        .and_then(|okm| okm.fill(&mut out))
        .map_err(|_| SealError::Library("no key can be derived"))?;
    Ok(out)
}

/// A key of 256 bits that seals snapshots. Cheap to clone; never printed.
#[derive(Clone)]
pub struct SealKey(Arc<Inner>);

struct Inner {
    bytes: [u8; 32],
    from: Prk,
    /// Of version 1.
    wrap: LessSafeKey,
    /// Says which key it is, and nothing about it.
    id: [u8; 16],
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({})", name(&self.0.id))
    }
}

impl PartialEq for SealKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

/// Names a key in messages.
fn name(id: &[u8]) -> String {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(id);
    to_hex(&bytes)[..32].to_owned()
}

impl SealKey {
    /// A new key.
    ///
    /// # Errors
    /// [`SealError::Library`] when the system gives no random bytes.
    pub fn generate() -> Result<Self, SealError> {
        Self::from_bytes(random()?)
    }

    /// The key with these bytes. They must be random: do not use a password.
    ///
    /// # Errors
    /// [`SealError::Library`] when the library refuses.
    pub fn from_bytes(bytes: [u8; 32]) -> Result<Self, SealError> {
        let from = Salt::new(HKDF_SHA256, b"afresh sealed blob version 1").extract(&bytes);
        let wrap = aead(&derive(&from, b"wrap")?)?;
        let id = derive(&from, b"id")?;
        Ok(Self(Arc::new(Inner { bytes, from, wrap, id })))
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0.bytes
    }

    /// Begins to seal a blob, with a new key.
    pub(crate) fn sealer(&self) -> Result<Sealer, SaveError> {
        let key = random::<32>()?;
        let salt = random::<40>()?;
        let mut trailer = [0; TRAILER];
        trailer[..8].copy_from_slice(&MAGIC);
        trailer[8..12].copy_from_slice(&VERSION_2.to_le_bytes());
        trailer[12..16].copy_from_slice(&CIPHER.to_le_bytes());
        trailer[16..20].copy_from_slice(&(CHUNK as u32).to_le_bytes());
        trailer[24..40].copy_from_slice(&self.0.id);
        trailer[NONCE].copy_from_slice(&salt[..NONCE.len()]);
        trailer[REST].copy_from_slice(&salt[NONCE.len()..]);
        let mut wrapped = key.to_vec();
        self.wrap_of(&trailer)?
            .seal_in_place_append_tag(
                // The only one under this key.
                Nonce::assume_unique_for_key([0; 12]),
                Aad::from(&trailer[..BOUND]),
                &mut wrapped,
            )
            .map_err(|_| SealError::Library("sealing failed"))?;
        trailer[WRAPPED].copy_from_slice(&wrapped);
        Ok(Sealer { key: aead(&key)?, next: 0, pending: Vec::new(), trailer })
    }

    /// The key that wraps the key of the one blob that ends with `trailer`, of version 2.
    fn wrap_of(&self, trailer: &[u8; TRAILER]) -> Result<LessSafeKey, SealError> {
        let salt = [&b"wrap 2"[..], &trailer[NONCE], &trailer[REST]].concat();
        aead(&derive(&self.0.from, &salt)?)
    }

    /// The key of the blob that ends with `trailer`.
    fn unwrap(&self, trailer: &[u8; TRAILER]) -> Result<LessSafeKey, SealError> {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&trailer[at..at + 4]);
            u32::from_le_bytes(word)
        };
        if trailer[..8] != MAGIC {
            return Err(SealError::Format("it has no magic number"));
        }
        let version = word(8);
        let known = matches!(version, VERSION_1 | VERSION_2);
        if !known || (word(12), word(16)) != (CIPHER, CHUNK as u32) {
            return Err(SealError::Format("it is of a version or cipher this build does not read"));
        }
        let rest = version == VERSION_1 && trailer[REST].iter().any(|byte| *byte != 0);
        if word(20) != 0 || rest {
            return Err(SealError::Format("a reserved byte of its trailer is not 0"));
        }
        if trailer[24..40] != self.0.id {
            let (sealed, given) = (name(&trailer[24..40]), name(&self.0.id));
            return Err(SealError::WrongKey { sealed, given });
        }
        let mut nonce = [0; 12];
        if version == VERSION_1 {
            nonce.copy_from_slice(&trailer[NONCE]);
        }
        let derived = (version == VERSION_2).then(|| self.wrap_of(trailer)).transpose()?;
        let mut wrapped = [0; 48];
        wrapped.copy_from_slice(&trailer[WRAPPED]);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let plain = derived
            .as_ref()
            .unwrap_or(&self.0.wrap)
            .open_in_place(nonce, Aad::from(&trailer[..BOUND]), &mut wrapped)
            .map_err(|_| SealError::Format("its trailer was damaged"))?;
        let mut key = [0; 32];
        key.copy_from_slice(plain);
        aead(&key)
    }

    /// The plain blob in a sealed one.
    pub(crate) fn open(&self, inner: Box<dyn BlobRead>) -> Result<Box<dyn BlobRead>, OpenError> {
        let body =
            inner.len().checked_sub(TRAILER as u64).ok_or(SealError::Format("it is too short"))?;
        let chunks = body.div_ceil((CHUNK + TAG) as u64);
        let len = body.checked_sub(chunks * TAG as u64).filter(|_| chunks > 0);
        let len = len.ok_or(SealError::Format("it is too short"))?;
        if chunks != len.div_ceil(CHUNK as u64).max(1) {
            return Err(SealError::Format("it is cut short").into());
        }
        let mut trailer = [0; TRAILER];
        let io = |e| OpenError::io(std::path::Path::new("a sealed blob"), e);
        inner.read_at(&mut trailer, body).map_err(io)?;
        let key = match self.unwrap(&trailer) {
            Err(_) if inner.distrust(body, TRAILER as u64) => {
                inner.read_at(&mut trailer, body).map_err(io)?;
                self.unwrap(&trailer)?
            }
            other => other?,
        };
        Ok(Box::new(SealedBlob { inner, key, chunks, len }))
    }
}

fn nonce(chunk: u64, last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[3] = last.into();
    bytes[4..].copy_from_slice(&chunk.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Seals the bytes of one blob.
pub(crate) struct Sealer {
    key: LessSafeKey,
    next: u64,
    /// Plain bytes of the chunk that is not whole, or may be the last.
    pending: Vec<u8>,
    trailer: [u8; TRAILER],
}

impl Sealer {
    fn chunk(&mut self, plain: &[u8], last: bool, out: &mut Vec<u8>) -> Result<(), SealError> {
        let from = out.len();
        out.extend_from_slice(plain);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(self.next, last), Aad::empty(), &mut out[from..])
            .map_err(|_| SealError::Library("sealing failed"))?;
        out.extend_from_slice(tag.as_ref());
        self.next += 1;
        Ok(())
    }

    /// Takes plain bytes, and puts what is to be written to `out`.
    pub(crate) fn push(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<(), SealError> {
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(plain);
        let mut rest = pending.as_slice();
        // The last chunk is not known to be the last before the end.
        while rest.len() > CHUNK {
            let (chunk, behind) = rest.split_at(CHUNK);
            self.chunk(chunk, false, out)?;
            rest = behind;
        }
        self.pending = rest.to_vec();
        Ok(())
    }

    /// Puts the end to `out`.
    pub(crate) fn finish(mut self, out: &mut Vec<u8>) -> Result<(), SealError> {
        let pending = std::mem::take(&mut self.pending);
        self.chunk(&pending, true, out)?;
        out.extend_from_slice(&self.trailer);
        Ok(())
    }
}

/// The plain bytes of a sealed blob.
struct SealedBlob {
    inner: Box<dyn BlobRead>,
    key: LessSafeKey,
    chunks: u64,
    len: u64,
}

impl SealedBlob {
    /// Where the chunks `first .. end` are in the sealed blob.
    fn place(&self, first: u64, end: u64) -> std::ops::Range<u64> {
        let at = |chunk: u64| chunk * (CHUNK + TAG) as u64;
        at(first)..at(end).min(self.inner.len() - TRAILER as u64)
    }

    /// Decrypts chunks with their tags in place. The first is number `first`.
    fn decrypt(&self, first: u64, bytes: &mut [u8]) -> Result<(), SealError> {
        for (number, chunk) in (first..self.chunks).zip(bytes.chunks_mut(CHUNK + TAG)) {
            let last = number + 1 == self.chunks;
            self.key
                .open_in_place(nonce(number, last), Aad::empty(), chunk)
                .map_err(|_| SealError::Chunk(number))?;
        }
        Ok(())
    }

    /// Reads and decrypts the chunks `first .. end` to `bytes`. Wrong ones are asked for again
    /// where that may help.
    fn read_chunks(&self, first: u64, end: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
        let place = self.place(first, end);
        bytes.resize((place.end - place.start) as usize, 0);
        self.inner.read_at(bytes, place.start)?;
        if let Err(error) = self.decrypt(first, bytes) {
            if !self.inner.distrust(place.start, place.end - place.start) {
                return Err(io::Error::other(error));
            }
            self.inner.read_at(bytes, place.start)?;
            self.decrypt(first, bytes).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// The chunks that hold `len` bytes from `offset` on, if the blob has them.
    fn chunks_of(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<u64>> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(offset / CHUNK as u64..end.div_ceil(CHUNK as u64))
    }
}

/// Copies what `out` needs, from byte `offset` of the blob on, from decrypted chunks with their
/// tags, from number `first` on.
fn copy_plain(first: u64, chunks: &[u8], offset: u64, out: &mut [u8]) {
    let end = offset + out.len() as u64;
    for (number, chunk) in (first..).zip(chunks.chunks(CHUNK + TAG)) {
        let start = number * CHUNK as u64;
        let plain = &chunk[..chunk.len().saturating_sub(TAG)];
        let from = offset.max(start);
        let to = end.min(start + plain.len() as u64);
        if from < to {
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&plain[(from - start) as usize..(to - start) as usize]);
        }
    }
}

impl BlobRead for SealedBlob {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let chunks = self.chunks_of(offset, out.len())?;
        let mut bytes = Vec::new();
        for first in chunks.clone().step_by(BATCH as usize) {
            self.read_chunks(first, chunks.end.min(first + BATCH), &mut bytes)?;
            copy_plain(first, &bytes, offset, out);
        }
        Ok(())
    }

    fn is_distant(&self) -> bool {
        self.inner.is_distant()
    }

    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        if !self.is_distant() {
            return parts.iter_mut().try_for_each(|(offset, out)| self.read_at(out, *offset));
        }
        let mut fetched = Vec::with_capacity(parts.len());
        for (offset, out) in parts.iter() {
            let chunks = self.chunks_of(*offset, out.len())?;
            let place = self.place(chunks.start, chunks.end);
            fetched.push((place.start, vec![0; (place.end - place.start) as usize]));
        }
        let mut wanted: Vec<_> =
            fetched.iter_mut().map(|(start, bytes)| (*start, bytes.as_mut_slice())).collect();
        self.inner.read_many(&mut wanted)?;
        for ((start, mut bytes), (offset, out)) in fetched.into_iter().zip(parts) {
            let first = start / (CHUNK + TAG) as u64;
            match self.decrypt(first, &mut bytes) {
                Ok(()) => copy_plain(first, &bytes, *offset, out),
                // Asks again, past what may be cached.
                Err(_) => self.read_at(out, *offset)?,
            }
        }
        Ok(())
    }

    fn distrust(&self, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len).div_ceil(CHUNK as u64).min(self.chunks);
        let place = self.place((offset / CHUNK as u64).min(end), end);
        self.inner.distrust(place.start, place.end - place.start)
    }

    fn carrier(&self) -> Option<&dyn BlobRead> {
        Some(&*self.inner)
    }
}
