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
    #[error("user {0} listens on the socket of the image server: start one as this user")]
    User(u32),
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
