//! An answer that begins while its call still runs: the output, then the result.
//!
//! Promises: it begins with the first output, or once code has run silently for [`SILENCE`].
//! Clients measure the time limit of code from the head of the answer. A result is encoded within
//! its call, and counts in the memory for bodies from then on, so results that no client reads are
//! bounded together.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use afresh::CallCost;
use afresh_interpreter::{Answer, Thrown};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use tokio::sync::oneshot;

use crate::body::StreamedAnswer;
use crate::budget::{Budget, Share};
use crate::error_response::ErrorResponse;
use crate::sandbox::agent::byte_channel::Receiver;
use crate::sandbox::agent::output_router::{EncodeOutput, EncodeResult};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Sandbox, run};

/// Time for which silent code runs before its answer begins. An error within this time is an error
/// response.
const SILENCE: Duration = Duration::from_secs(1);

/// The form of the answer to a run.
#[derive(Clone, Copy)]
pub(crate) struct ResponseEncoding {
    /// The first bytes, with the number of the run.
    pub(crate) head: fn(u64) -> Vec<u8>,
    /// The output.
    pub(crate) encode_output: EncodeOutput,
    /// Its results, each from an object in JSON; `None` for other bytes.
    pub(crate) encode_result: EncodeResult,
    /// The result, and the end.
    pub(crate) last: EncodeEnd,
}

/// The encoding of the result of a call, and of its end, with its cost where that is known.
pub(crate) type EncodeEnd = fn(&Answer, Option<&CallCost>) -> Vec<u8>;

/// Runs code in a sandbox. The answer begins with the first output, or after a second without any.
/// Code that ends before that is answered whole, and an error before that is an error response.
pub(crate) async fn run_streaming(
    all: Arc<Sandboxes>,
    sandbox: Arc<Sandbox>,
    (what, source): (u8, String),
    (encoding, memory): (ResponseEncoding, Budget),
) -> Result<Response, ErrorResponse> {
    let language = all.template_of(&sandbox).language;
    let (mut router, own, killed) = (all.output_router(&sandbox), sandbox.clone(), sandbox.clone());
    let printed = router.route_code_output(encoding.encode_output, encoding.encode_result);
    let (begin, begun) = oneshot::channel();
    let running: PendingAnswer = Box::pin(async move {
        let ran = all.with(&sandbox, move |session| {
            let mut mark = own.mark.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let head = (encoding.head)(own.runs.fetch_add(1, Ordering::Relaxed) + 1);
            router.begin(head.clone());
            // The client may have left.
            let _ = begin.send(());
            let answer = run(session, language, (what, &source), &mut mark, &mut router)?;
            let last = (encoding.last)(&answer, router.take_cost().as_ref());
            CallEnd::hold(head, last, &memory)
        });
        ran.await
    });
    let killed = move || killed.killed.load(Ordering::Relaxed);
    let silent = async {
        match begun.await {
            Ok(()) => tokio::time::sleep(SILENCE).await,
            // It was refused, so the call ends.
            Err(_) => std::future::pending().await,
        }
    };
    answer_when_begun(printed, running, silent, encoding.last, Box::new(killed)).await
}

/// Whether the sandbox was killed during the call. The answer breaks off then, as clients expect:
/// they ask whether the sandbox runs.
type IsKilled = Box<dyn Fn() -> bool + Send + Sync>;

/// The sandbox was killed during the call.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox was killed")]
struct SandboxKilled;

/// The answer, once there is output or `silent` ends.
async fn answer_when_begun(
    mut printed: Receiver,
    mut running: PendingAnswer,
    silent: impl Future<Output = ()>,
    last: EncodeEnd,
    killed: IsKilled,
) -> Result<Response, ErrorResponse> {
    tokio::select! {
        biased;
        Some(first) = printed.take() => {
            Ok(streamed(Some(first), printed, running, (last, killed)))
        }
        ran = &mut running => {
            if ran.is_err() && killed() {
                let running: PendingAnswer = Box::pin(std::future::ready(ran));
                return Ok(streamed(None, printed, running, (last, killed)));
            }
            let CallEnd { head, last, .. } = ran?;
            // It may have printed something and ended since it was looked for; the head is with
            // that then.
            let mut whole = Vec::new();
            while let Some(piece) = printed.try_take() {
                whole.extend_from_slice(&piece);
            }
            if whole.is_empty() {
                whole = head;
            }
            whole.extend(last);
            Ok(Response::new(Body::from(whole)))
        }
        () = silent => Ok(streamed(None, printed, running, (last, killed))),
    }
}

fn streamed(
    first: Option<Bytes>,
    printed: Receiver,
    running: PendingAnswer,
    (last, killed): (EncodeEnd, IsKilled),
) -> Response {
    let has_head = first.is_some();
    let body = StreamingBody { first, printed, running: Some(running), has_head, last, killed };
    let mut response = Response::new(Body::new(body));
    response.extensions_mut().insert(StreamedAnswer);
    response
}

/// The end of an answer whose call has ended.
struct CallEnd {
    /// The first bytes of the answer. Output that was sent began with them.
    head: Vec<u8>,
    /// The result and the end.
    last: Vec<u8>,
    /// Counts it until it is sent, where the connection counts it.
    share: Share,
}

impl CallEnd {
    fn hold(head: Vec<u8>, last: Vec<u8>, memory: &Budget) -> Result<Self, ErrorResponse> {
        let mut share = memory.share();
        match share.add(last.len()) {
            true => Ok(Self { head, last, share }),
            false => Err(ErrorResponse::no_answer_memory()),
        }
    }
}

/// Returns the end of the answer.
type PendingAnswer = Pin<Box<dyn Future<Output = Result<CallEnd, ErrorResponse>> + Send>>;

struct StreamingBody {
    first: Option<Bytes>,
    printed: Receiver,
    /// `None` at the end.
    running: Option<PendingAnswer>,
    /// Whether there was output, which begins with the head.
    has_head: bool,
    last: EncodeEnd,
    killed: IsKilled,
}

impl HttpBody for StreamingBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        // It ends with the call, whose result comes after all output.
        if let Some(piece) = ready!(self.printed.poll_take(context)) {
            self.has_head = true;
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(running) = &mut self.running else { return Poll::Ready(None) };
        let ran = ready!(running.as_mut().poll(context));
        self.running = None;
        let text = match ran {
            Ok(CallEnd { head, last, share }) => {
                drop(share);
                if self.has_head { last } else { [head, last].concat() }
            }
            Err(_) if (self.killed)() => return Poll::Ready(Some(Err(SandboxKilled.into()))),
            // An error that would have been a status before the first byte.
            Err(refusal) => {
                let name = "SandboxError".to_owned();
                (self.last)(
                    &Answer::Threw(Thrown { name, message: refusal.message, trace: None }),
                    None,
                )
            }
        };
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::sandbox::agent::byte_channel::{Sender, byte_channel};

    fn call_end() -> Result<CallEnd, ErrorResponse> {
        CallEnd::hold(b"head".to_vec(), b" end".to_vec(), &Budget::new(100))
    }

    #[test]
    fn results_that_wait_for_their_clients_share_the_memory_for_bodies() {
        let memory = Budget::new(100);
        let hold = |bytes| CallEnd::hold(Vec::new(), vec![0; bytes], &memory);
        let waiting = hold(60).ok().unwrap();
        let refused = hold(60).err().unwrap();
        assert_eq!((refused.status.as_u16(), refused.later), (500, false), "it has run");
        drop(waiting);
        assert!(hold(60).is_ok());
    }

    fn answer_text(running: impl FnOnce(Sender) -> PendingAnswer) -> String {
        answer_text_after(std::future::pending(), running)
    }

    fn answer_text_after(
        silent: impl Future<Output = ()>,
        running: impl FnOnce(Sender) -> PendingAnswer,
    ) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (sender, printed) = byte_channel();
            let begun = answer_when_begun(
                printed,
                running(sender),
                silent,
                |_, _| b" refused".to_vec(),
                Box::new(|| false),
            )
            .await
            .unwrap();
            let body = begun.into_body().collect().await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        })
    }

    #[test]
    fn output_arrives_even_if_the_call_ends_at_once() {
        let silent = answer_text(|_| Box::pin(async { call_end() }));
        assert_eq!(silent, "head end");
        // Both within one look.
        let quick = answer_text(|sender| {
            Box::pin(async move {
                sender.give("head printed".into()).await;
                call_end()
            })
        });
        assert_eq!(quick, "head printed end");
        let slow = answer_text(|sender| {
            Box::pin(async move {
                sender.give("head one".into()).await;
                drop(sender);
                tokio::task::yield_now().await;
                call_end()
            })
        });
        assert_eq!(slow, "head one end");
    }

    #[test]
    fn silent_code_is_answered_while_it_runs() {
        // The answer has a body before the call ends, so the wait for it is not for the call.
        let (end, ended) = oneshot::channel();
        let silent = async {
            let _ = end.send(());
        };
        let still = answer_text_after(silent, |sender| {
            let call = tokio::spawn(async move {
                ended.await.unwrap();
                drop(sender);
            });
            Box::pin(async move {
                call.await.unwrap();
                call_end()
            })
        });
        assert_eq!(still, "head end");
        let later = answer_text_after(std::future::ready(()), |sender| {
            let call = tokio::spawn(async move { sender.give("head one".into()).await });
            Box::pin(async move {
                call.await.unwrap();
                call_end()
            })
        });
        assert_eq!(later, "head one end");
    }
}
