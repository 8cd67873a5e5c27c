//! A file of a sandbox on its way to a client, piece by piece.
//!
//! Promises: the client gets the file as it was at the request. One piece at a time is in memory,
//! however large the file is and however much of it is holes. The version of the file that a slow
//! client keeps is charged to its sandbox, see
//! [`Downloads`](crate::sandbox::transfer::downloads::Downloads).

use std::pin::Pin;
use std::task::{Context, Poll};

use afresh::files::Refused;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::task::JoinHandle;

use crate::sandbox::transfer::downloads::Download;

/// Maximum bytes of a piece.
pub(crate) const MAX_PIECE_BYTES: u64 = 128 << 10;

/// The rest of a file.
pub(crate) struct FileBody {
    left: u64,
    state: State,
}

enum State {
    /// The file, and where its rest begins.
    Idle(Download, u64),
    Reading(JoinHandle<Read>),
    Over,
}

/// A piece, and the offset of the rest.
type Read = (Download, u64, Result<Vec<u8>, Refused>);

/// The file ends before it should, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the upload ended before the file was complete; send it again")]
struct TruncatedFile;

impl FileBody {
    /// All of a file of `size` bytes.
    pub(crate) fn new(file: Download, size: u64) -> Self {
        Self { left: size, state: State::Idle(file, 0) }
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            match std::mem::replace(&mut self.state, State::Over) {
                State::Over => return Poll::Ready(None),
                State::Idle(_, _) if self.left == 0 => return Poll::Ready(None),
                State::Idle(file, at) => {
                    let piece = MAX_PIECE_BYTES.min(self.left) as usize;
                    // Host layers may take time to read.
                    let reading = tokio::task::spawn_blocking(move || {
                        let mut bytes = vec![0; piece];
                        // The sandbox may have been killed.
                        let reader = file.reader().ok_or(Refused::Missing);
                        let read = reader.and_then(|reader| reader.read(at, &mut bytes));
                        let read = read.map(|length| {
                            bytes.truncate(length);
                            bytes
                        });
                        (file, at, read)
                    });
                    self.state = State::Reading(reading);
                }
                State::Reading(mut reading) => {
                    let Poll::Ready(done) = Pin::new(&mut reading).poll(context) else {
                        self.state = State::Reading(reading);
                        return Poll::Pending;
                    };
                    return Poll::Ready(Some(match done {
                        Ok((file, at, Ok(bytes))) if !bytes.is_empty() => {
                            let length = bytes.len() as u64;
                            self.left -= length;
                            self.state = State::Idle(file, at + length);
                            Ok(Frame::data(bytes.into()))
                        }
                        _ => Err(TruncatedFile.into()),
                    }));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use afresh::files::{Budget, Node, Time, Tree};
    use http_body_util::BodyExt;

    use super::*;
    use crate::sandbox::transfer::downloads::Downloads;

    fn body_of(tree: &Tree, node: Node, size: u64) -> FileBody {
        let download = Downloads::default().begin(tree, node, u64::MAX, |_| Ok(())).unwrap();
        FileBody::new(download, size)
    }

    #[tokio::test]
    async fn a_file_comes_in_pieces_as_it_was() {
        let mut tree = Tree::new(Budget::default());
        let bytes: Vec<u8> = (0..300_000_u32).flat_map(|number| number.to_le_bytes()).collect();
        let node = tree.write_path("/a", &bytes, Time::now()).unwrap();
        let body = body_of(&tree, node, bytes.len() as u64);
        assert_eq!(body.size_hint().exact(), Some(bytes.len() as u64));
        tree.write_path("/a", b"later", Time::now()).unwrap();
        assert!(body.collect().await.unwrap().to_bytes() == bytes);
    }

    #[tokio::test]
    async fn a_download_breaks_off_with_its_sandbox() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/a", &vec![1; 300 << 10], Time::now()).unwrap();
        let downloads = Downloads::default();
        let download = downloads.begin(&tree, node, u64::MAX, |_| Ok(())).unwrap();
        let mut body = FileBody::new(download, 300 << 10);
        assert!(body.frame().await.unwrap().is_ok() && downloads.bytes() >= 300 << 10);
        downloads.end();
        assert!(body.frame().await.unwrap().is_err());
        assert_eq!(downloads.bytes(), 0);
    }

    #[tokio::test]
    async fn a_hole_takes_a_piece_of_memory() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/hole", b"", Time::now()).unwrap();
        tree.set_size(node, 1 << 30, Time::now()).unwrap();
        let mut body = body_of(&tree, node, 1 << 30);
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            let bytes = frame.unwrap().into_data().unwrap();
            assert!(bytes.len() as u64 <= MAX_PIECE_BYTES);
            length += bytes.len();
        }
        assert_eq!(length, 1 << 30);
    }
}
