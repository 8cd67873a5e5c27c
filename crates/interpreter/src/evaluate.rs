//! One evaluation: a call of a guest, with everything that belongs to it.

use afresh::wasm::entropy_bytes;
use afresh::{CallError, Callee, Lease};

use crate::listener::{Hearing, Listener};
use crate::request::Request;

/// How an evaluation went.
#[derive(Debug)]
pub struct Evaluated<L> {
    /// What the guest answered, for [`Answer::read`](crate::Answer::read); the error is of a call that gave no answer.
    pub answer: Result<Vec<u8>, CallError>,
    /// Who heard it, with what came of that.
    pub listener: L,
}

/// Makes one call of a guest. What the guest asks meanwhile is asked of `listener`, where the guest was opened with
/// [`imports`](crate::imports) and [`state`](crate::state) of its type.
pub fn evaluate<'f, L: Listener>(
    lease: &mut Lease<'_>,
    function: impl Into<Callee<'f>>,
    mut request: Request,
    listener: L,
) -> Evaluated<L> {
    if let Some(module) = lease.as_module() {
        let host = module.host_mut();
        *host.state::<Hearing<L>>() = Hearing::of(listener);
        request.address_to(host.generation(), entropy_bytes());
    }
    let answer = lease.call(function, request.bytes());
    let mut heard = Hearing::default();
    if let Some(module) = lease.as_module() {
        heard = std::mem::take(module.host_mut().state::<Hearing<L>>());
    }
    // One that answers by a frame gives nothing back.
    let given = heard.given;
    let answer = answer.map(|answer| given.unwrap_or(answer));
    Evaluated { answer, listener: heard.listener }
}
