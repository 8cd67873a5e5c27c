//! Why a process makes its own image.

use afresh_memory::ImageError;
use afresh_sys::SysError;

use super::message::RefusalReason;

/// An image server gave no image. The process makes its own then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageClientError {
    /// No process answers at the socket, or it stopped in the middle.
    #[error("the image server does not answer: {0}")]
    Server(#[from] SysError),
    /// The server closed the connection without an answer.
    #[error("the image server closed the connection: it has too many clients, or another user")]
    Closed,
    /// The socket belongs to another user, who could serve other content.
    #[error(
        "user {0} listens on the socket of the image server, or one that this user namespace does \
         not map: start a server as this user"
    )]
    User(u32),
    /// Other users can replace the socket.
    #[error("other users can write to the directory of the socket: use one of this user alone")]
    Unprotected,
    /// The bytes of the server are no answer.
    #[error("the image server's answer has another form: use the same version of afresh")]
    Answer,
    /// The file could change, or has another length than the image.
    #[error("the image server's file is not the sealed file of this image: {0}")]
    File(SysError),
    /// The server refused.
    #[error("the image server refused: {0}")]
    Refused(RefusalReason),
    /// The image could not be mapped.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The directory of the store could not be opened.
    #[error("opening the store for the image server: {0}")]
    Directory(SysError),
}

impl ImageClientError {
    /// A bit for its kind. A client reports each kind once. `None` for a server that is busy, and
    /// so may have the image later.
    pub(super) fn kind(&self) -> Option<u32> {
        let number = match self {
            Self::Refused(RefusalReason::Busy) => return None,
            Self::Server(_) => 0,
            Self::Closed => 1,
            Self::User(_) => 2,
            Self::Unprotected => 3,
            Self::Answer => 4,
            Self::File(_) => 5,
            Self::Image(_) => 6,
            Self::Directory(_) => 7,
            Self::Refused(RefusalReason::Budget) => 8,
            Self::Refused(RefusalReason::NoDirectory) => 9,
            Self::Refused(RefusalReason::Images) => 10,
            Self::Refused(RefusalReason::Failed) => 11,
        };
        Some(1 << number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_errors_have_a_bit_each_and_a_busy_server_has_none() {
        use RefusalReason as Reason;
        let refused = [Reason::Budget, Reason::NoDirectory, Reason::Images, Reason::Failed];
        let refused = refused.map(ImageClientError::Refused);
        let others =
            [ImageClientError::Closed, ImageClientError::User(1), ImageClientError::Unprotected];
        let all = others.iter().chain(&refused);
        let bits = all.map(|error| error.kind().unwrap()).fold((0, 0), |(count, bits), bit| {
            assert_eq!((bit.count_ones(), bits & bit), (1, 0));
            (count + 1, bits | bit)
        });
        assert_eq!((bits.0, bits.1.count_ones()), (7, 7));
        assert_eq!(ImageClientError::Refused(Reason::Busy).kind(), None);
        assert_eq!(ImageClientError::User(1).kind(), ImageClientError::User(2).kind());
    }
}
