//! Internal crate of `afresh`. Ed25519 keys of NATS users, over the cryptographic library that the
//! workspace links anyway.
//!
//! `async-nats` signs with the crate `nkeys`, which would add twenty packages and a second
//! implementation of Ed25519. The workspace's manifest has this crate take its place. It has the
//! functions that `async-nats` and `afresh-serve` call, with the same names, and builds without
//! that patch use the original.
//!
//! Promises: a damaged seed, or one of another kind than a key that signs, is an error. A seed is
//! never printed.

use std::fmt;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};

/// Characters of an encoded seed.
const SEED_LENGTH: usize = 58;
/// The upper five bits of the first byte of a seed: `S`.
const SEED_PREFIX: u8 = 18 << 3;
/// The first byte of a public curve key: `X`. Such keys encrypt, and do not sign.
const CURVE_PREFIX: u8 = 23 << 3;
/// The alphabet of base 32, without padding.
const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

/// A seed is unusable, or nothing could be signed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(&'static str);

/// A key that signs.
pub struct KeyPair {
    kind: u8,
    pair: Ed25519KeyPair,
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "KeyPair({})", self.public_key())
    }
}

/// The checksum of encoded keys: CRC-16 of XMODEM.
fn checksum(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| {
        (0..8).fold(sum ^ (u16::from(*byte) << 8), |sum, _| match sum & 0x8000 {
            0 => sum << 1,
            _ => (sum << 1) ^ 0x1021,
        })
    })
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut buffer, mut bits) = (Vec::with_capacity(text.len() * 5 / 8), 0_u32, 0);
    for byte in text.bytes() {
        let digit = ALPHABET.iter().position(|known| *known == byte)?;
        buffer = (buffer << 5) | u32::try_from(digit).ok()?;
        bits += 5;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(buffer >> bits).ok()?);
            buffer &= (1 << bits) - 1;
        }
    }
    // Bits that belong to no byte are zero.
    (buffer == 0).then_some(bytes)
}

fn encode(bytes: &[u8]) -> String {
    let (mut text, mut buffer, mut bits) = (String::with_capacity(bytes.len() * 2), 0_usize, 0);
    for byte in bytes {
        buffer = (buffer << 8) | usize::from(*byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            text.push(char::from(ALPHABET[buffer >> bits]));
            buffer &= (1 << bits) - 1;
        }
    }
    if bits > 0 {
        text.push(char::from(ALPHABET[buffer << (5 - bits)]));
    }
    text
}

impl KeyPair {
    /// The key of an encoded seed, as `nk -gen user` prints it.
    ///
    /// # Errors
    /// [`Error`] if the text is no seed, or one of a curve key.
    pub fn from_seed(seed: &str) -> Result<Self, Error> {
        if seed.len() != SEED_LENGTH {
            return Err(Error("a seed has 58 characters"));
        }
        let bytes = decode(seed).ok_or(Error("a seed has letters and the digits 2 to 7 only"))?;
        let (head, sum) = bytes.split_last_chunk::<2>().ok_or(Error("the seed is too short"))?;
        if checksum(head) != u16::from_le_bytes(*sum) {
            return Err(Error("the checksum of the seed is wrong"));
        }
        let [first, second, raw @ ..] = head else { return Err(Error("the seed is too short")) };
        if first & 0xf8 != SEED_PREFIX {
            return Err(Error("a seed begins with S"));
        }
        let kind = ((first & 7) << 5) | (second >> 3);
        if kind == CURVE_PREFIX {
            return Err(Error("the seed is of a curve key, which cannot sign"));
        }
        let pair = Ed25519KeyPair::from_seed_unchecked(raw);
        Ok(Self { kind, pair: pair.map_err(|_| Error("the seed is no Ed25519 key"))? })
    }

    /// The encoded public key.
    #[must_use]
    pub fn public_key(&self) -> String {
        let mut bytes = vec![self.kind];
        bytes.extend_from_slice(self.pair.public_key().as_ref());
        bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
        encode(&bytes)
    }

    /// The signature of a message.
    ///
    /// # Errors
    /// [`Error`] from the library.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let signature = self.pair.try_sign(message);
        Ok(signature.map_err(|_| Error("nothing was signed"))?.as_ref().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key that `nk -gen user -pubout` made.
    const SEED: &str = "SUAIO3FHUX5PNV2LQIIP7TZ3N4L7TX3W53MQGEIVYFIGA635OZCKEYHFLM";

    #[test]
    fn a_seed_gives_the_public_key_that_nats_knows_it_by() {
        let pair = KeyPair::from_seed(SEED).unwrap();
        let public = pair.public_key();
        assert!(public.starts_with('U') && public.len() == 56, "{public}");
        let bytes = decode(&public).unwrap();
        let key = aws_lc_rs::signature::UnparsedPublicKey::new(
            &aws_lc_rs::signature::ED25519,
            &bytes[1..33],
        );
        key.verify(b"nonce", &pair.sign(b"nonce").unwrap()).unwrap();
        assert!(!format!("{pair:?}").contains(SEED));
    }

    #[test]
    fn damaged_seeds_are_refused_with_their_fault() {
        let changed = SEED.replace("AIO3", "AIO4");
        let short = &SEED[1..];
        let lower = SEED.to_lowercase();
        let public = KeyPair::from_seed(SEED).unwrap().public_key();
        for (seed, fault) in [
            ("", "58"),
            (short, "58"),
            (changed.as_str(), "checksum"),
            (lower.as_str(), "letters"),
            (public.as_str(), "58"),
        ] {
            let error = KeyPair::from_seed(seed).unwrap_err().to_string();
            assert!(error.contains(fault), "{seed}: {error}");
        }
    }
}
