//! The messages of processes that share images: fixed numbers of bytes.
//!
//! A request has the digests of a memory and of its snapshot, and can bring a descriptor of the
//! directory of the store. An answer has a status, and brings a descriptor of the file with an
//! image.

use afresh_store::Sha256;

/// The first bytes of each message, with the version of the protocol and of the layout of files.
const MAGIC: [u8; 8] = *b"afimage1";

/// Length of a request.
pub(crate) const REQUEST_BYTES: usize = 72;
/// Length of an answer.
pub(crate) const ANSWER_BYTES: usize = 24;

/// A request for the memory of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// Digest of the memory, of [`afresh_store::Snapshot::memory_digest`].
    pub memory: [u8; 32],
    /// Digest of the manifest of a snapshot that has this memory.
    pub snapshot: Sha256,
}

impl ImageRequest {
    /// The request as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..40].copy_from_slice(&self.memory);
        bytes[40..].copy_from_slice(&self.snapshot.0);
        bytes
    }

    /// The request in `bytes`. `None` for any other bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REQUEST_BYTES] = bytes.try_into().ok()?;
        let digest = |at: usize| bytes[at..at + 32].try_into().ok();
        (bytes[..8] == MAGIC).then_some(())?;
        Some(Self { memory: digest(8)?, snapshot: Sha256(digest(40)?) })
    }
}

/// Why a server gives no image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The budget is used up by images that processes have.
    Budget,
    /// The server reads as many snapshots as it may at a time.
    Busy,
    /// The server does not have the image, and the client passed no directory.
    NoDirectory,
    /// Processes have as many images as the server may keep, or its descriptors ran out.
    Images,
    /// The server could not read the snapshot a short time ago.
    Failed,
}

impl RefusalReason {
    const ALL: [(Self, u8); 5] = [
        (Self::Budget, 1),
        (Self::Busy, 2),
        (Self::NoDirectory, 3),
        (Self::Images, 4),
        (Self::Failed, 5),
    ];
}

impl std::fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Budget => "its budget is used up: raise --budget of `afresh images`",
            Self::Busy => "it reads other snapshots now",
            Self::NoDirectory => {
                "it does not have this image, and received no store to read it from"
            }
            Self::Images => "it has too few descriptors for more images: raise its ulimit -n",
            Self::Failed => "it could not read this snapshot: its log has the cause",
        })
    }
}

/// An answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageAnswer {
    /// The image is in the file that comes with the answer, which has this length.
    Image {
        /// Length of the file.
        bytes: u64,
    },
    /// The server has no image so far. It reads the snapshot now, or at the next request.
    Pending,
    /// There is no image.
    Refused(RefusalReason),
}

impl ImageAnswer {
    /// The answer as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let (status, value) = match self {
            Self::Image { bytes } => (1, *bytes),
            Self::Pending => (2, 0),
            Self::Refused(reason) => {
                let number = RefusalReason::ALL.iter().find(|(known, _)| known == reason);
                (3, number.map_or(0, |(_, number)| u64::from(*number)))
            }
        };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&u64::to_le_bytes(status));
        bytes[16..].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    /// The answer in `bytes`. `None` for any other bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ANSWER_BYTES] = bytes.try_into().ok()?;
        let number = |at: usize| bytes[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        (bytes[..8] == MAGIC).then_some(())?;
        match (number(8)?, number(16)?) {
            (1, bytes) => Some(Self::Image { bytes }),
            (2, 0) => Some(Self::Pending),
            (3, number) => RefusalReason::ALL
                .iter()
                .find(|(_, known)| u64::from(*known) == number)
                .map(|(reason, _)| Self::Refused(*reason)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_as_they_were_encoded() {
        let request = ImageRequest { memory: [7; 32], snapshot: Sha256([9; 32]) };
        assert_eq!(ImageRequest::decode(&request.encode()), Some(request));
        let refused = RefusalReason::ALL.map(|(reason, _)| ImageAnswer::Refused(reason));
        for answer in [ImageAnswer::Image { bytes: u64::MAX }, ImageAnswer::Pending]
            .into_iter()
            .chain(refused)
        {
            assert_eq!(ImageAnswer::decode(&answer.encode()), Some(answer));
        }
    }

    #[test]
    fn other_bytes_are_no_message() {
        let request = ImageRequest { memory: [7; 32], snapshot: Sha256([9; 32]) }.encode();
        let answer = ImageAnswer::Refused(RefusalReason::Busy).encode();
        for length in 0..REQUEST_BYTES {
            assert_eq!(ImageRequest::decode(&request[..length]), None);
            assert_eq!(ImageAnswer::decode(&answer[..length.min(ANSWER_BYTES - 1)]), None);
        }
        for (at, value) in [(0, b'b'), (7, b'2'), (8, 4), (9, 1), (16, 6), (17, 1)] {
            let mut changed = answer;
            changed[at] = value;
            assert_eq!(ImageAnswer::decode(&changed), None, "byte {at}");
        }
        assert_eq!(ImageRequest::decode(&[0; REQUEST_BYTES]), None);
    }
}
